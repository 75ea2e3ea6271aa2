"""What a reading of the GPU means, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_metal.monitor.reading import GpuReading, StateShare

Kind = Literal["loaded", "busy", "idle", "suspicious", "unknown"]

_LOADED_RATIO = 0.9
_IDLE_RATIO = 0.1
# Even the smallest chip draws watts when it works all the time.
_NEAR_ZERO_MW = 500
# Shares are printed with two digits, so their mean is near the headline rather than equal to it.
_AGREEMENT = 0.05
_NOT_PYTORCH = "this is MLX, not PyTorch MPS: the tools of `torch.mps` say nothing about it"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`summary` is one line; `details` explain it, most important first."""

    kind: Kind
    summary: str
    details: tuple[str, ...] = ()


def judge(reading: GpuReading | None, *, num_running: int | None = None) -> Verdict:
    """`num_running` is how many requests the engine was running meanwhile, where that is known."""
    if reading is None:
        return Verdict("unknown", "no program here tells of a GPU of Apple's")
    if (busy_ratio := reading.busy_ratio) is None:
        return Verdict("unknown", "nothing tells how busy the GPU is")
    if busy_ratio < _LOADED_RATIO:
        return _less_than_loaded(reading, busy_ratio, num_running)
    if reading.power_mw is not None and reading.power_mw < _NEAR_ZERO_MW:
        return Verdict(
            "suspicious",
            f"suspicious: {busy_ratio:.0%} active at only {format_power(reading.power_mw)}",
            (
                "a GPU that computes all the time draws watts, so one of the two figures is wrong or of "
                "another moment: take a longer sample under concurrent load",
                _NOT_PYTORCH,
            ),
        )
    return Verdict(
        "loaded",
        f"fully loaded: {_figures(reading, busy_ratio)}",
        (*_states(reading), *_frequency(reading), *_heat(reading), *_watts(reading), _NOT_PYTORCH),
    )


def format_power(power_mw: float) -> str:
    return f"{power_mw / 1000:.1f} W" if power_mw >= 100 else f"{power_mw:.0f} mW"


def _less_than_loaded(reading: GpuReading, busy_ratio: float, num_running: int | None) -> Verdict:
    figures = _figures(reading, busy_ratio)
    burst = (
        "a single short request is a burst that a sample of 1 s misses: look while several requests generate"
    )
    if busy_ratio >= _IDLE_RATIO:
        return Verdict("busy", f"working, with room left: {figures}", (burst, *_heat(reading), _NOT_PYTORCH))
    if num_running:
        requests = "1 request runs" if num_running == 1 else f"{num_running} requests run"
        return Verdict("idle", f"idle, though {requests}: {figures}", (burst, _NOT_PYTORCH))
    return Verdict(
        "idle",
        f"idle: {figures}",
        ("low figures are normal while nothing is generated, or a model loads", burst, _NOT_PYTORCH),
    )


def _figures(reading: GpuReading, busy_ratio: float) -> str:
    parts = [f"{busy_ratio:.0%} {'utilised' if reading.active_ratio is None else 'active'}"]
    if reading.active_frequency_mhz is not None:
        top = reading.top_frequency_mhz
        parts.append(f"{reading.active_frequency_mhz:.0f}{f' of {top:.0f}' if top else ''} MHz")
    if reading.power_mw is not None:
        parts.append(format_power(reading.power_mw))
    return ", ".join(parts)


def _states(reading: GpuReading) -> Iterator[str]:
    """How what was granted compares with what was asked for."""
    requested, granted = _numbers(reading.requested), _numbers(reading.granted)
    if not requested or not granted:
        return
    asked, given = _range("P", requested), _range("P", granted)
    if max(granted) < max(requested):
        yield (
            f"the firmware asked for {asked} and power and thermal limits settled it at {given}: "
            "normal dynamic scaling, not a fault"
        )
    else:
        yield f"the firmware asked for {asked} and got {given}"


def _frequency(reading: GpuReading) -> Iterator[str]:
    headline, mean, top = (
        reading.active_frequency_mhz,
        reading.mean_frequency_mhz,
        reading.top_frequency_mhz,
    )
    if headline is None or mean is None:
        return
    if abs(mean - headline) <= _AGREEMENT * headline:
        yield f"the states' weighted mean of {mean:.0f} MHz agrees with the headline"
    else:
        yield (
            f"the states' weighted mean of {mean:.0f} MHz does not agree with the headline of "
            f"{headline:.0f} MHz: take another sample"
        )
    if top:
        yield f"it ran at {headline / top:.0%} of its fastest state, {top:.0f} MHz"


def _heat(reading: GpuReading) -> Iterator[str]:
    if reading.thermal_pressure not in (None, "Nominal"):
        yield f"macOS reports `{reading.thermal_pressure}` thermal pressure: the chip slows down to stay cool"


def _watts(reading: GpuReading) -> Iterator[str]:
    if reading.power_mw is not None:
        yield "how many watts a loaded GPU draws depends on the chip: a base one is saturated at 8 to 10 W"


def _numbers(states: tuple[StateShare, ...]) -> list[int]:
    """The numbers of the states that took a part of the time worth naming."""
    return sorted({share.number for share in states if share.ratio >= 0.02 and share.number is not None})


def _range(prefix: str, numbers: list[int]) -> str:
    low, high = f"{prefix}{numbers[0]}", f"{prefix}{numbers[-1]}"
    return low if low == high else f"{low}–{high}"
