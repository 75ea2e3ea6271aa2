"""One look at the GPU: the same shape whatever program took it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class FrequencyShare:
    """The share of the time, 0 to 1, that went by at one frequency."""

    frequency_mhz: float
    ratio: float


@dataclass(frozen=True, slots=True)
class StateShare:
    """The share of the time, 0 to 1, that went by in one performance state, such as `P8` or `SW_P2`."""

    state: str
    ratio: float

    @property
    def number(self) -> int | None:
        """8 of `P8`; None for a name of another kind."""
        named = re.fullmatch(r"(?:SW_)?P(\d{1,3})", self.state, re.ASCII)
        return int(named[1]) if named else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What `source` told of the GPU over `elapsed_s`; None or empty where it told nothing. Ratios are 0 to 1.

    `active_ratio` is the share of the time the hardware was active, at whatever frequency, and
    `utilization_ratio` the driver's own idea of that. Frequencies come in the source's order, and one may
    stand there more than once. `requested` are the states asked for, `granted` those that came of it.
    """

    source: str
    machine: str | None = None
    chip: str | None = None
    core_count: int | None = None
    elapsed_s: float | None = None
    active_ratio: float | None = None
    active_frequency_mhz: float | None = None
    frequencies: tuple[FrequencyShare, ...] = ()
    requested_frequencies: tuple[FrequencyShare, ...] = ()
    requested: tuple[StateShare, ...] = ()
    granted: tuple[StateShare, ...] = ()
    power_mw: float | None = None
    combined_power_mw: float | None = None
    temperature_celsius: float | None = None
    thermal_pressure: str | None = None
    utilization_ratio: float | None = None
    memory_in_use_bytes: int | None = None
    memory_allocated_bytes: int | None = None

    @property
    def busy_ratio(self) -> float | None:
        """The active residency, or where there is none the driver's utilisation."""
        return self.utilization_ratio if self.active_ratio is None else self.active_ratio

    @property
    def mean_frequency_mhz(self) -> float | None:
        """The mean of `frequencies`, weighted by their shares; None where nothing was active."""
        total = sum(share.ratio for share in self.frequencies)
        if total <= 0:
            return None
        return sum(share.frequency_mhz * share.ratio for share in self.frequencies) / total

    @property
    def top_frequency_mhz(self) -> float | None:
        """The fastest state the chip has; None where the source lists none, or not all."""
        numbers = [share.number or 0 for share in (*self.requested, *self.granted)]
        if len(self.frequencies) < max(numbers, default=0):
            return None
        return max((share.frequency_mhz for share in self.frequencies), default=None)

    def filled_from(self, other: GpuReading) -> GpuReading:
        """This reading with what it lacks taken from `other`."""
        gaps = {
            field.name: getattr(other, field.name)
            for field in fields(self)
            if getattr(self, field.name) in (None, ()) and getattr(other, field.name) not in (None, ())
        }
        return replace(self, source=f"{self.source} + {other.source}", **gaps) if gaps else self
