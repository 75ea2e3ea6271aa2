"""Runs a step on MLX: unpadded prefill chunks one by one, then one batched forward for rows that sample.

A prompt's last token is a decode row like any other, so logits are computed only where a token is drawn.
Lives on the engine thread.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from vllm_metal.engine.core import ModelRunnerOutput
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.mlx.sampler import sample
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import SchedulerOutput

logger = logging.getLogger(__name__)


class ModelRunner:
    """`batched` false decodes row by row, for models whose caches cannot be merged, or not rightly."""

    def __init__(self, model: Any, *, batched: bool) -> None:
        self.model = model
        self.batched = batched
        self._batch = kv_cache.DecodeBatch()
        self._caches: dict[Request, kv_cache.LayerCaches] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._drop(output.dropped)
        rows = []
        for request, num_tokens in output.num_scheduled_tokens.items():
            samples = num_tokens == request.num_remaining_tokens
            if num_prefill := num_tokens - samples:
                self._prefill(request, num_prefill)
            if samples:
                rows.append(request)
        logits = mx.array([])
        if rows:
            logits, rows = self._decode_batched(rows) if self.batched else self._decode_serial(rows)
        # Cache metadata too is evaluated at every step: left lazy, it grows into one graph of many steps.
        held = [self._batch.caches, *self._caches.values()]
        mx.eval(logits, [cache.state for caches in held for cache in caches])
        return _output(rows, sample(logits, rows)) if rows else ModelRunnerOutput()

    def reset(self) -> None:
        self._batch = kv_cache.DecodeBatch()
        self._caches.clear()
        mx.clear_cache()

    def close(self) -> None:
        """Drop every array, and the streams of this thread: one that ends with them aborts the process."""
        self.reset()
        self.model = None
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _prefill(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        # The logits are never looked at, so the vocabulary projection is never computed.
        self.model(mx.array([request.token_ids[start : start + num_tokens]]), cache=self._caches_of(request))

    def _decode_batched(self, rows: list[Request]) -> tuple[mx.array, list[Request]]:
        """Logits [rows, vocabulary] and the requests in the order of the batch's rows."""
        decoding = set(self._batch.requests)
        joining = [request for request in rows if request not in decoding]
        self._batch.add(joining, [self._caches_of(request) for request in joining])
        for request in joining:
            del self._caches[request]
        # A request that decodes does so in every step until it ends or is preempted.
        assert len(self._batch.requests) == len(rows)
        tokens = mx.array([[request.token_ids[-1]] for request in self._batch.requests])
        return self.model(tokens, cache=self._batch.caches)[:, -1], list(self._batch.requests)

    def _decode_serial(self, rows: list[Request]) -> tuple[mx.array, list[Request]]:
        logits = [
            self.model(mx.array([request.token_ids[-1:]]), cache=self._caches_of(request))[:, -1]
            for request in rows
        ]
        return mx.concatenate(logits), rows

    def _caches_of(self, request: Request) -> kv_cache.LayerCaches:
        """The caches of a request that is not in the decode batch."""
        if request not in self._caches:
            self._caches[request] = kv_cache.new_caches(self.model)
        return self._caches[request]

    def _drop(self, requests: list[Request]) -> None:
        self._batch.remove(set(requests))
        for request in requests:
            self._caches.pop(request, None)


def _output(rows: list[Request], token_ids: list[int | None]) -> ModelRunnerOutput:
    output = ModelRunnerOutput()
    for request, token_id in zip(rows, token_ids, strict=True):
        if token_id is None:
            output.errors[request] = "the model's output for this request is not a number (NaN)"
        else:
            output.token_ids[request] = token_id
    return output
