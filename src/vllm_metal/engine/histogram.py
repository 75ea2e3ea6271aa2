"""Counts values by the ranges they fall in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values were at most each of `bounds`, but above the one before; last, those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """`bounds` ascend."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._distribution: Distribution | None = None

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._distribution = None

    def distribution(self) -> Distribution:
        """Made anew only after an `observe`: it is asked for at every step."""
        if self._distribution is None:
            self._distribution = Distribution(self._bounds, tuple(self._counts), self._sum)
        return self._distribution
