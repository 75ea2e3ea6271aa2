"""Engines of several models take turns on the device: none stretches the steps that another measures."""

from __future__ import annotations

import time
from collections import deque
from threading import Lock, Semaphore
from types import TracebackType
from typing import Self

#: For how long an engine that has stepped counts as one of those that share the device.
_RECENT_S = 1.0
#: How much the newest step counts in what is typical.
_NEWEST_WEIGHT = 0.2


class DeviceTurns:
    """The arbiter: one engine at a time, first come, first served. One that is alone never waits."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._queue: deque[Turn] = deque()  # whose turn it is, and who waits for theirs
        self._members: list[Turn] = []

    def join(self) -> Turn:
        """For a new engine, to keep until it leaves."""
        turn = Turn(self)
        with self._lock:
            self._members.append(turn)
        return turn


class Turn:
    """One engine's access to the device, for its own thread. Taken, it covers all of a step, from the launch
    until the result is read:

        turn = turns.join()
        with turn:
            ...launch, read...
        turn.leave()

    An engine that launches one step ahead holds on to its turn with `take`, for as long as it has steps and
    until the turn is `wanted`; then it reads what it has launched and calls `give`. One whose readers wait
    for every step tells `stepped` how long it took.
    """

    def __init__(self, turns: DeviceTurns) -> None:
        self._turns = turns
        self._called = Semaphore(0)
        self._is_taken = False
        self._stepped_at_s = float("-inf")
        self._step_s: float | None = None

    def take(self) -> None:
        """Wait for the turn, unless it is held already."""
        if self._is_taken:
            return
        turns = self._turns
        with turns._lock:
            turns._queue.append(self)
            is_first = turns._queue[0] is self
        if not is_first:
            self._called.acquire()
        self._is_taken = True

    def give(self) -> None:
        """Pass the turn on, if it is held."""
        if not self._is_taken:
            return
        self._is_taken = False
        turns = self._turns
        with turns._lock:
            turns._queue.popleft()
            if turns._queue:
                turns._queue[0]._called.release()

    @property
    def wanted(self) -> bool:
        """Whether others wait while this one is held. Costs nothing to ask."""
        return len(self._turns._queue) > 1

    def stepped(self, duration_s: float) -> None:
        """A step has taken so long, waiting not included."""
        self._stepped_at_s = time.monotonic()
        known_s = duration_s if self._step_s is None else self._step_s
        self._step_s = known_s + _NEWEST_WEIGHT * (duration_s - known_s)

    @property
    def others_step_s(self) -> float | None:
        """How long steps of those that share the device take just now, the longest of them; None when alone.

        Who has much to do and no reader that waits for every step is kind to keep its own within this.
        """
        since_s = time.monotonic() - _RECENT_S
        with self._turns._lock:
            others = [turn for turn in self._turns._members if turn is not self]
        return max(
            (turn._step_s for turn in others if turn._step_s is not None and turn._stepped_at_s >= since_s),
            default=None,
        )

    def leave(self) -> None:
        """Give the turn and be no more one of those that share."""
        self.give()
        with self._turns._lock:
            self._turns._members.remove(self)

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give()
