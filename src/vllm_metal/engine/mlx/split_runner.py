"""Runs a step on mlx-lm's own caches: unpadded prefill chunks one by one, then one batched forward.

Right for almost every model. A prompt's last token is a decode row like any other, so logits are computed
only where a token is drawn. Lives on the engine thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vllm_metal.engine.mlx import adapters, device, kv_cache
from vllm_metal.engine.mlx.prompt_logprobs import StepPromptLogprobs
from vllm_metal.engine.mlx.sampler import Sampler
from vllm_metal.engine.mlx.step import Step
from vllm_metal.engine.mlx.step_tokens import StepTokens
from vllm_metal.engine.rectangular_kv_cache_manager import (
    Change,
    Drop,
    Free,
    RectangularKVCacheManager,
    Restore,
    Store,
)
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import SchedulerOutput


class SplitRunner:
    """`batched` false decodes row by row, for models whose caches cannot be merged, or not rightly."""

    def __init__(self, model: Any, kv: RectangularKVCacheManager, sampler: Sampler, *, batched: bool) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.batched = batched
        self._adapters = adapters.of(model)
        self._batch = kv_cache.DecodeBatch()
        self._caches: dict[Request, kv_cache.LayerCaches] = {}
        self._snapshots: dict[int, kv_cache.LayerCaches] = {}
        self._previous: Step | None = None

    def launch(self, output: SchedulerOutput) -> Step:
        self._apply(self.kv.take_changes())
        rows = []
        prompt_logprobs = StepPromptLogprobs(output.num_scheduled_tokens)
        for request, num_tokens in output.num_scheduled_tokens.items():
            samples = num_tokens == request.num_remaining_tokens
            if num_prefill := num_tokens - samples:
                prompt_logprobs.take_chunk(request, self._prefill(request, num_prefill))
            if samples:
                rows.append(request)
        logits, rows = self._decode(rows) if rows else (None, [])
        # Cache metadata too is evaluated at every step: left lazy, it grows into one graph of many steps.
        held = [self._batch.caches, *self._caches.values()]
        state = [kv_cache.states(caches) for caches in held]
        self._previous = Step(self.sampler, logits, rows, prompt_logprobs, state)
        return self._previous

    def reset(self) -> None:
        self.kv.forget_prefixes()
        self.kv.take_changes()
        self._snapshots.clear()
        self._batch = kv_cache.DecodeBatch()
        self._caches.clear()
        self._previous = None
        self.sampler.reset()
        mx.clear_cache()

    def rest(self) -> None:
        self.sampler.reset()
        mx.clear_cache()

    def close(self) -> None:
        self.reset()
        self.model = None
        device.leave_thread()

    def _apply(self, changes: list[Change]) -> None:
        freed = set()
        for change in changes:
            match change:
                case Store(snapshot_id, request):
                    decodes = request in self._batch.requests
                    caches = self._batch.extract(request) if decodes else self._caches[request]
                    snapshot = kv_cache.snapshot(caches)
                    # Left lazy it would hold the caches it was made from.
                    mx.async_eval(kv_cache.states(snapshot))
                    self._snapshots[snapshot_id] = snapshot
                case Restore(snapshot_id, request):
                    self._caches[request] = kv_cache.restored(self._snapshots[snapshot_id])
                case Free(request):
                    self._caches.pop(request, None)
                    freed.add(request)
                case Drop(snapshot_id):
                    del self._snapshots[snapshot_id]
        self._batch.remove(freed)

    def _prefill(self, request: Request, num_tokens: int) -> mx.array:
        """Logits [tokens, vocabulary]: where nobody looks at them, the projection is never computed."""
        start = request.num_computed_tokens
        token_ids = mx.array([request.token_ids[start : start + num_tokens]])
        with self._adapters.used_by_requests([request]):
            logits: mx.array = self.model(token_ids, cache=self._caches_of(request))
        return logits[0]

    def _decode(self, rows: list[Request]) -> tuple[mx.array, list[Request]]:
        """Logits [rows, vocabulary], and whose they are."""
        if not self.batched:
            logits = [self._forward([request], self._caches_of(request)) for request in rows]
            return mx.concatenate(logits), rows
        decoding = set(self._batch.requests)
        joining = [request for request in rows if request not in decoding]
        self._batch.add(joining, [self._caches_of(request) for request in joining])
        for request in joining:
            del self._caches[request]
        # One whose last token is sampled ends when that token is read, a step later, and may be kept then.
        for request in (leaving := decoding - set(rows)):
            self._caches[request] = self._batch.extract(request)
        self._batch.remove(leaving)
        rows = list(self._batch.requests)
        return self._forward(rows, self._batch.caches), rows

    def _forward(self, rows: list[Request], caches: kv_cache.LayerCaches) -> mx.array:
        """Logits [rows, vocabulary] of each request's last token."""
        tokens = StepTokens(self._previous.sampled if self._previous else None)
        for request in rows:
            tokens.add(request, request.num_tokens - 1, 1)
        token_ids, _ = tokens.to_device()
        with self._adapters.used_by_requests(rows):
            logits: mx.array = self.model(token_ids[:, None], cache=caches)[:, -1]
        return logits

    def _caches_of(self, request: Request) -> kv_cache.LayerCaches:
        """The caches of a request that is not in the decode batch."""
        if request not in self._caches:
            self._caches[request] = kv_cache.new_caches(self.model)
        return self._caches[request]
