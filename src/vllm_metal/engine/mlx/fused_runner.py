"""Runs a step as one forward of token rows over slots; see `fused.py`. Lives on the engine thread."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import mlx.core as mx

from vllm_metal.engine.mlx import head, sdpa
from vllm_metal.engine.mlx.fused import Chunk, DecodeGroup, LayerKV, StepPlan
from vllm_metal.engine.mlx.input_tokens import InputTokens
from vllm_metal.engine.mlx.sampler import SampledStep, Sampler
from vllm_metal.engine.mlx.slot_arrays import LayerShape, SlotArrays
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import SchedulerOutput
from vllm_metal.engine.slot_pool import SLOT_COUNTS, SlotKVCacheManager, SlotPool

#: Chunks and key lengths are rounded up to these, so that steps come in few shapes.
_CHUNK_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_KEY_STEP = 256


class FusedRunner:
    """`buckets` rounds shapes up: right where a new shape is dear and an idle row cheap, on a GPU."""

    def __init__(
        self,
        model: Any,
        layers: list[LayerShape],
        kv: SlotKVCacheManager,
        sampler: Sampler,
        *,
        buckets: bool,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.buckets = buckets
        self._layers = layers
        self._selection = head.select_rows(model)
        self._arrays = SlotArrays(layers)
        self._previous: SampledStep | None = None
        sdpa.install()

    def launch(self, output: SchedulerOutput) -> SampledStep:
        self._arrays.apply(self.kv.take_changes())
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            mx.async_eval(self._arrays.arrays)
            return SampledStep([], mx.array([]), mx.array([]))
        tokens = InputTokens(self._previous)
        positions: list[int] = []
        sampled: dict[Request, int] = {}
        groups = self._plan_groups(scheduled, tokens, positions, sampled)
        chunks = self._plan_chunks(scheduled, tokens, positions, sampled)
        plan = StepPlan(mx.array(positions), groups, chunks)
        step = self.sampler.sample(self._forward(tokens, plan, list(sampled.values())), list(sampled))
        mx.async_eval(step.token_ids, step.valid, self._arrays.arrays)
        self._previous = step
        return step

    def reset(self) -> None:
        self.kv.take_changes()
        self._arrays = SlotArrays(self._layers)
        self._previous = None
        mx.clear_cache()

    def close(self) -> None:
        """Drop every array, and the streams of this thread: one that ends with them aborts the process."""
        self.reset()
        self.model = None
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _plan_groups(
        self,
        scheduled: dict[Request, int],
        tokens: InputTokens,
        positions: list[int],
        sampled: dict[Request, int],
    ) -> list[DecodeGroup]:
        """A group for each pool in which someone decodes: rows in the order of its slots."""
        groups = []
        for pool in self.kv.pools.values():
            if not any(scheduled.get(request) == 1 for request in pool.requests):
                continue
            offset = len(positions)
            num_rows = pool.num_slots if self.buckets else len(pool.requests)
            longest = 0
            for request in pool.requests:
                # A row that does not decode writes where nothing is yet, or where nobody looks any more.
                position = min(request.num_computed_tokens, pool.capacity - 1)
                if scheduled.get(request) == 1:
                    if request.num_remaining_tokens == 1:
                        sampled[request] = len(positions)
                    tokens.add(request, position, 1)
                    longest = max(longest, position + 1)
                else:
                    tokens.pad(1)
                positions.append(position)
            idle = num_rows - len(pool.requests)
            tokens.pad(idle)
            positions += idle * [0]
            groups.append(DecodeGroup(pool.capacity, num_rows, offset, self._key_length(longest, pool)))
        return groups

    def _plan_chunks(
        self,
        scheduled: dict[Request, int],
        tokens: InputTokens,
        positions: list[int],
        sampled: dict[Request, int],
    ) -> list[Chunk]:
        chunks = []
        for request, num_tokens in scheduled.items():
            if num_tokens == 1:
                continue
            slot, start, offset = self.kv.slot(request), request.num_computed_tokens, len(positions)
            tokens.add(request, start, num_tokens)
            if num_tokens == request.num_remaining_tokens:
                sampled[request] = offset + num_tokens - 1
            padded = min(self._chunk_length(num_tokens), slot.capacity - start)
            tokens.pad(padded - num_tokens)
            positions += range(start, start + padded)
            chunks.append(Chunk(slot, start, padded, offset))
        return chunks

    def _forward(self, tokens: InputTokens, plan: StepPlan, rows: list[int]) -> mx.array:
        """Logits [rows, vocabulary]; there may be rows of padding at the end."""
        rows = rows or [0]
        if self.buckets:
            rows = rows + (SLOT_COUNTS[bisect_left(SLOT_COUNTS, len(rows))] - len(rows)) * [rows[0]]
        caches = [LayerKV(plan, self._arrays, layer) for layer in range(len(self._layers))]
        with self._selection.only(mx.array(rows, mx.int32)):
            logits: mx.array = self.model(tokens.array()[:, None], cache=caches)
        if logits.shape[0] != len(rows):
            logits = logits[mx.array(rows)]
        return logits[:, 0]

    def _key_length(self, num_tokens: int, pool: SlotPool) -> int:
        if not self.buckets:
            return num_tokens
        return min(-(-num_tokens // _KEY_STEP) * _KEY_STEP, pool.capacity)

    def _chunk_length(self, num_tokens: int) -> int:
        if not self.buckets:
            return num_tokens
        index = bisect_left(_CHUNK_LENGTHS, num_tokens)
        return _CHUNK_LENGTHS[index] if index < len(_CHUNK_LENGTHS) else num_tokens
