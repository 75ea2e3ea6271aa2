"""Log probabilities of the given token and of the likeliest ones: of the model's own, unaltered logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from vllm_metal.engine.outputs import TokenLogprobs
from vllm_metal.engine.request import Request

_BLOCK = 64


class StepLogprobs:
    """What a step's requests that asked are told: `chosen` [requests], `top_ids` and `top` [requests, k]."""

    def __init__(
        self, requests: Sequence[Request], chosen: mx.array, top_ids: mx.array, top: mx.array
    ) -> None:
        self.requests = requests
        self.arrays = [chosen, top_ids, top]

    def read(self, token_ids: dict[Request, int]) -> dict[Request, TokenLogprobs]:
        """Wait for them. They go with `token_ids`, where a request without any has failed."""
        chosen, top_ids, top = (cast(list[Any], array.tolist()) for array in self.arrays)
        read = {}
        for row, request in enumerate(self.requests):
            if request in token_ids:
                count = request.params.logprobs
                pairs = likely(top_ids[row][:count], top[row][:count])
                read[request] = TokenLogprobs(token_ids[request], chosen[row], pairs)
        return read


class Logprobs:
    """Computes them for the rows that ask."""

    def __init__(self) -> None:
        self.active = False

    def arrange(self, rows: Sequence[Request | None]) -> None:
        """Make ready for steps of these rows."""
        asking = [
            (row, request)
            for row, request in enumerate(rows)
            if request and request.params.logprobs is not None
        ]
        self.active = bool(asking)
        if self.active:
            self._requests = [request for _, request in asking]
            self._index = mx.array([row for row, _ in asking])
            self._num_top = max(request.params.logprobs or 0 for request in self._requests)

    def of(self, logits: mx.array, token_ids: mx.array) -> StepLogprobs:
        """For `logits` [rows, vocabulary] and the tokens [rows] that were given."""
        told = token_logprobs(logits[self._index], token_ids[self._index], self._num_top)
        return StepLogprobs(self._requests, *told)


def token_logprobs(
    logits: mx.array, token_ids: mx.array, num_top: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Those of `token_ids` [rows]; then ids and those of each row's likeliest tokens [rows, num_top]."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(logits, token_ids[:, None], axis=-1) - total)[:, 0]
    top_ids, top = largest(logits, num_top)
    return chosen, top_ids, top - total


def likely(token_ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """The pairs, without tokens that cannot come."""
    pairs = zip(token_ids, logprobs, strict=True)
    return tuple(pair for pair in pairs if pair[1] > -math.inf)


def largest(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Indices and values [rows, count] of each row's largest `values`, in falling order.

    They lie in the `count` blocks whose own largest values are the largest: so nothing long is sorted.
    """
    rows, size = values.shape
    padded = mx.pad(values, [(0, 0), (0, -size % _BLOCK)], constant_values=-mx.inf)
    blocks = padded.reshape(rows, -1, _BLOCK)
    best = mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[:, :count, None]
    indices = (best * _BLOCK + mx.arange(_BLOCK, dtype=best.dtype)).reshape(rows, -1)
    candidates = mx.take_along_axis(padded, indices, axis=-1)
    order = mx.argsort(-candidates, axis=-1)[:, :count]
    return mx.take_along_axis(indices, order, axis=-1), mx.take_along_axis(candidates, order, axis=-1)
