"""Numbers of other programs, taken only where number and unit are beyond doubt."""

from __future__ import annotations

_POWER_MW = {"uW": 1e-3, "µW": 1e-3, "mW": 1.0, "W": 1e3}
_FREQUENCY_MHZ = {"Hz": 1e-6, "kHz": 1e-3, "KHz": 1e-3, "MHz": 1.0, "GHz": 1e3}
# Above bytes of memory and nanoseconds of a day, and below what a float cannot hold.
_MOST = 10**18
# No GPU of Apple's is as fast as the first nor as slow as the second.
_MOST_MHZ = 10_000
_LEAST_HZ = 10_000_000


def number(value: object) -> float | None:
    """`value` if it is a number of 0 or more, within reason."""
    # To Python a boolean is a number.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MOST:
        return float(value)
    return None


def ratio(value: object) -> float | None:
    """A share of 0 to 1; a rounding error above 1 is cut off, more than that is no share."""
    share = number(value)
    return round(min(share, 1.0), 9) if share is not None and share <= 1.005 else None


def idle_to_active(idle_ratio: float | None) -> float | None:
    return None if idle_ratio is None else round(1.0 - idle_ratio, 9)


def power_mw(amount: float, unit: str) -> float | None:
    return amount * _POWER_MW[unit] if unit in _POWER_MW else None


def frequency_mhz(amount: float, unit: str) -> float | None:
    return amount * _FREQUENCY_MHZ[unit] if unit in _FREQUENCY_MHZ else None


def bare_frequency_mhz(value: object) -> float | None:
    """A GPU's frequency without a unit: fields named `freq_hz` hold MHz, and may come to hold Hz one day."""
    amount = number(value)
    if amount is None or amount < _MOST_MHZ:
        return amount
    return amount / 1e6 if amount >= _LEAST_HZ else None
