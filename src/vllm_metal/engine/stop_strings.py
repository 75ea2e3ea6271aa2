"""Finds stop strings in text that arrives in pieces, and holds back what may yet become one."""

from __future__ import annotations


class StopStrings:
    """`feed` returns text that is safe to show; `met` is the stop string, once there has been one.

    That string itself is shown only if `included`.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        self.met: str | None = None
        self._stops = stops
        self._included = included
        self._held = ""

    def feed(self, text: str) -> str:
        """Text up to the earliest stop string, less a tail that is the beginning of one."""
        if not self._stops:
            return text
        self._held += text
        found = [(begin, len(stop), stop) for stop in self._stops if (begin := self._held.find(stop)) >= 0]
        if found:
            begin, length, self.met = min(found)
            safe, self._held = self._held[: begin + length * self._included], ""
            return safe
        cut = len(self._held) - self._num_held()
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        safe, self._held = self._held, ""
        return safe

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def _num_held(self) -> int:
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
