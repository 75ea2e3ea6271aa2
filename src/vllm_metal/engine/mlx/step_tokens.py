"""The token rows of a step: ids, some of which the step before has yet to sample, and positions."""

from __future__ import annotations

import mlx.core as mx

from vllm_metal.engine.mlx.sampler import SampledStep
from vllm_metal.engine.request import Request


class StepTokens:
    """Collects rows on the host. They go to the device as one array, since each costs a transfer."""

    def __init__(self, previous: SampledStep | None) -> None:
        self.previous = previous.token_ids if previous else mx.zeros(1, mx.uint32)
        self._previous_rows = previous.row_of if previous else {}
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        #: The first row of each request.
        self.offsets: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, request: Request, start: int, num_tokens: int) -> None:
        """Tokens of `request` from position `start` on, the last of which may be pending."""
        self.offsets[request] = len(self)
        known = request.token_ids[start : start + num_tokens]
        self._token_ids += known
        if len(known) < num_tokens:
            # A negative id stands for a row of the step before.
            self._token_ids.append(-1 - self._previous_rows[request])
        self._positions += range(start, start + num_tokens)

    def pad(self, num_tokens: int, position: int = 0) -> None:
        """Rows that nobody reads, at successive positions."""
        self._token_ids += num_tokens * [0]
        self._positions += range(position, position + num_tokens)

    def pack(self) -> mx.array:
        """[2, rows]: ids and positions."""
        return mx.array([self._token_ids, self._positions], mx.int32)


def unpack(packed: mx.array, previous: mx.array) -> tuple[mx.array, mx.array]:
    """Token ids [rows], with the pending ones filled in from `previous` [its rows], and positions [rows]."""
    token_ids, positions = packed[0], packed[1]
    sampled = previous[mx.maximum(-1 - token_ids, 0)].astype(mx.int32)
    return mx.where(token_ids < 0, sampled, token_ids), positions
