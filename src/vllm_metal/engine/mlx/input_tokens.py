"""The token ids that go into a step, some of which the step before has yet to sample."""

from __future__ import annotations

import mlx.core as mx

from vllm_metal.engine.mlx.sampler import SampledStep
from vllm_metal.engine.request import Request


class InputTokens:
    """Collects the token rows of a step."""

    def __init__(self, previous: SampledStep | None) -> None:
        self._previous = previous
        self._rows = {request: row for row, request in enumerate(previous.requests)} if previous else {}
        self._token_ids: list[int] = []
        self._pending: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, request: Request, start: int, num_tokens: int) -> None:
        """Tokens of `request` from position `start` on, the last of which may be pending."""
        known = request.token_ids[start : start + num_tokens]
        self._token_ids += known
        if len(known) < num_tokens:
            self._pending[len(self._token_ids)] = self._rows[request]
            self._token_ids.append(0)

    def pad(self, num_tokens: int) -> None:
        self._token_ids += num_tokens * [0]

    def array(self) -> mx.array:
        """[tokens]"""
        token_ids = mx.array(self._token_ids)
        if not self._pending:
            return token_ids
        assert self._previous is not None
        source = [0] * len(self._token_ids)
        is_pending = [False] * len(self._token_ids)
        for index, row in self._pending.items():
            source[index], is_pending[index] = row, True
        sampled = self._previous.token_ids[mx.array(source)].astype(token_ids.dtype)
        return mx.where(mx.array(is_pending), sampled, token_ids)
