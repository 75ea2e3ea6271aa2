"""The token rows of a step: ids, some of which the step before has yet to sample, and where they belong."""

from __future__ import annotations

import mlx.core as mx

from vllm_metal.engine.mlx.sampler import SampledStep
from vllm_metal.engine.request import Request


class StepTokens:
    """Collects rows on the host."""

    def __init__(self, previous: SampledStep | None) -> None:
        self._previous = previous.token_ids if previous else mx.zeros(1, mx.uint32)
        self._previous_rows = previous.row_of if previous else {}
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._adapters: list[int] = []
        #: The first row of each request.
        self.offsets: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, request: Request, start: int, num_tokens: int, *, slot: int = 0) -> None:
        """Tokens of `request` from position `start` on, the last of which may be pending."""
        self.offsets[request] = len(self)
        self._starts += num_tokens * [len(self)]
        self._slots += num_tokens * [slot]
        self._adapters += num_tokens * [request.adapter]
        self._positions += range(start, start + num_tokens)
        known = request.token_ids[start : start + num_tokens]
        self._token_ids += known
        if len(known) < num_tokens:
            # A negative id stands for a row of the step before.
            self._token_ids.append(-1 - self._previous_rows[request])

    def add_idle(self, position: int, *, slot: int) -> None:
        """A row that nobody reads, which writes to this place."""
        self._starts.append(len(self))
        self._adapters.append(0)
        self._slots.append(slot)
        self._positions.append(position)
        self._token_ids.append(0)

    def pad(self, num_rows: int) -> None:
        """Rows that nobody reads, as if the last request had so many more tokens."""
        self._token_ids += num_rows * [0]
        self._positions += range(self._positions[-1] + 1, self._positions[-1] + 1 + num_rows)
        self._slots += num_rows * self._slots[-1:]
        self._starts += num_rows * self._starts[-1:]
        self._adapters += num_rows * [0]

    @property
    def have_adapters(self) -> bool:
        return any(self._adapters)

    def to_device(self) -> tuple[mx.array, mx.array]:
        """Token ids [rows], and each row's position, slot, the row that begins its chunk and, if any has one,
        its adapter [3 or 4, rows].
        """
        columns = [self._token_ids, self._positions, self._slots, self._starts]
        if self.have_adapters:
            columns.append(self._adapters)
        # One array, since each costs a transfer.
        packed = mx.array(columns, mx.int32)
        token_ids = packed[0]
        sampled = self._previous[mx.maximum(-1 - token_ids, 0)].astype(mx.int32)
        return mx.where(token_ids < 0, sampled, token_ids), packed[1:]
