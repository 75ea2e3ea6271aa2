"""Runs a step as one forward of token rows over slots; see `fused.py`. Lives on the engine thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vllm_metal.engine.mlx import device, head, linear, sdpa
from vllm_metal.engine.mlx.fused import Chunk, DecodeGroup, LayerKV, StepPlan
from vllm_metal.engine.mlx.prompt_logprobs import StepPromptLogprobs
from vllm_metal.engine.mlx.sampler import SampledStep, Sampler
from vllm_metal.engine.mlx.slot_arrays import LayerShape, SlotArrays
from vllm_metal.engine.mlx.step_tokens import StepTokens, unpack
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import SchedulerOutput
from vllm_metal.engine.slot_kv_cache_manager import SLOT_COUNTS, SlotKVCacheManager

#: Chunks are rounded up to these, so that steps come in few shapes.
_CHUNK_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LEAST_KEY_LENGTH = 256
#: Traces kept. More shapes than that are not met again soon.
_MOST_TRACES = 128


class FusedRunner:
    """`static` is for a device where a new shape is dear and an idle row cheap, a GPU: shapes are rounded up,
    and steps that only decode are traced once a shape and replayed.
    """

    def __init__(
        self,
        model: Any,
        layers: list[LayerShape],
        kv: SlotKVCacheManager,
        sampler: Sampler,
        *,
        static: bool,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.static = static
        self._layers = layers
        if mx.cuda.is_available():
            linear.flatten_rows(model)
        self._selection = head.select_rows(model)
        self._arrays = SlotArrays(layers)
        self._previous: SampledStep | None = None
        self._decodes: dict[tuple[DecodeGroup, ...], Callable[..., Any]] = {}
        sdpa.install()

    def launch(self, output: SchedulerOutput) -> SampledStep:
        self._arrays.apply(self.kv.take_changes())
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            mx.async_eval(self._arrays.arrays)
            return SampledStep.nothing()
        tokens = StepTokens(self._previous)
        rows: list[Request | None] = []
        groups = self._plan_groups(scheduled, tokens, rows)
        chunks = self._plan_chunks(scheduled, tokens, rows)
        prompt_logprobs = StepPromptLogprobs(scheduled)
        asked = prompt_logprobs.rows(tokens.offsets)
        if chunks:
            logits, rows = self._forward_selected(tokens, groups, chunks, rows, asked)
            asked_logits = logits[len(rows) :]
        else:
            if self.static:
                logits = self._replay(tokens, groups)
            else:
                logits = self._forward(tokens.pack(), tokens.previous, groups, [], self._arrays)
            asked_logits = logits[mx.array(asked, mx.int32)]
        step = self.sampler.sample(logits[: len(rows)], rows)
        prompt_logprobs.take(asked_logits)
        step.prompt_logprobs = prompt_logprobs
        mx.async_eval(step.arrays, self._arrays.arrays)
        self._previous = step
        return step

    def reset(self) -> None:
        self.kv.forget_prefixes()
        self.kv.take_changes()
        self._arrays = SlotArrays(self._layers)
        self._previous = None
        self.sampler.reset()
        mx.clear_cache()

    def rest(self) -> None:
        self.sampler.reset()
        mx.clear_cache()

    def close(self) -> None:
        self.reset()
        self._decodes.clear()
        self.model = None
        device.leave_thread()

    def _plan_groups(
        self, scheduled: dict[Request, int], tokens: StepTokens, rows: list[Request | None]
    ) -> list[DecodeGroup]:
        """A group for each pool in which someone decodes: a token row for each slot, in order.

        `rows` gets for each token row the request that it samples for.
        """
        groups = []
        for pool in self.kv.pools.values():
            decoding = [request for request in pool.requests if scheduled.get(request) == 1]
            if not decoding:
                continue
            longest = max(request.num_computed_tokens for request in decoding) + 1
            offset = len(tokens)
            num_rows = pool.num_slots if self.static else pool.num_leading_rows
            for request in pool.rows[:num_rows]:
                if request is None:
                    tokens.pad(1)
                    rows.append(None)
                elif scheduled.get(request) == 1:
                    tokens.add(request, request.num_computed_tokens, 1)
                    rows.append(request if request.num_remaining_tokens == 1 else None)
                else:
                    # It writes where its next chunk will, or past its end, where nobody looks any more.
                    tokens.pad(1, min(request.num_computed_tokens, pool.capacity - 1))
                    rows.append(None)
            groups.append(
                DecodeGroup(pool.capacity, num_rows, offset, self._key_length(longest, pool.capacity))
            )
        return groups

    def _plan_chunks(
        self, scheduled: dict[Request, int], tokens: StepTokens, rows: list[Request | None]
    ) -> list[Chunk]:
        chunks = []
        for request, num_tokens in scheduled.items():
            if num_tokens == 1:
                continue
            slot, start, offset = self.kv.slot(request), request.num_computed_tokens, len(tokens)
            padded = min(self._chunk_length(num_tokens), slot.capacity - start)
            tokens.add(request, start, num_tokens)
            tokens.pad(padded - num_tokens, start + num_tokens)
            rows += padded * [None]
            if num_tokens == request.num_remaining_tokens:
                rows[offset + num_tokens - 1] = request
            end = start + padded
            # Alone from its beginning it is plainly causal, which is the fastest attention there is.
            key_length = end if start == 0 else self._key_length(end, slot.capacity)
            chunks.append(Chunk(slot, start, padded, offset, key_length))
        return chunks

    def _forward_selected(
        self,
        tokens: StepTokens,
        groups: list[DecodeGroup],
        chunks: list[Chunk],
        rows: list[Request | None],
        asked: list[int],
    ) -> tuple[mx.array, list[Request | None]]:
        """Logits of the rows that sample, and whose they are; of some other row if there are none.

        Logits of the `asked` rows come behind them.
        """
        selected = [row for row, request in enumerate(rows) if request is not None] or [0]
        requests = [rows[row] for row in selected]
        if self.static:
            padding = SLOT_COUNTS[bisect_left(SLOT_COUNTS, len(selected))] - len(selected)
            selected += padding * [0]
            requests += padding * [None]
        selected += asked
        index = mx.array(selected, mx.int32)
        with self._selection.only(index):
            logits = self._forward(tokens.pack(), tokens.previous, groups, chunks, self._arrays)
        return logits if self._selection.applied else logits[index], requests

    def _replay(self, tokens: StepTokens, groups: list[DecodeGroup]) -> mx.array:
        """The forward of a step that only decodes, traced the first time it has this shape."""
        key = tuple(groups)
        capacities = [group.capacity for group in groups]
        if key not in self._decodes:
            if len(self._decodes) == _MOST_TRACES:
                self._decodes.clear()

            def decode(packed: mx.array, previous: mx.array, *flat: mx.array) -> list[mx.array]:
                arrays = SlotArrays(self._layers)
                arrays.put(capacities, flat)
                return [self._forward(packed, previous, groups, [], arrays), *arrays.take(capacities)]

            self._decodes[key] = mx.compile(decode)
        logits: mx.array
        logits, *flat = self._decodes[key](tokens.pack(), tokens.previous, *self._arrays.take(capacities))
        self._arrays.put(capacities, flat)
        return logits

    def _forward(
        self,
        packed: mx.array,
        previous: mx.array,
        groups: list[DecodeGroup],
        chunks: list[Chunk],
        arrays: SlotArrays,
    ) -> mx.array:
        """Logits [token rows, vocabulary], or those of the selected rows."""
        token_ids, positions = unpack(packed, previous)
        plan = StepPlan(positions, groups, chunks)
        caches = [LayerKV(plan, arrays, layer) for layer in range(len(self._layers))]
        logits: mx.array = self.model(token_ids[:, None], cache=caches)
        return logits[:, 0]

    def _key_length(self, num_tokens: int, capacity: int) -> int:
        """Rounded up by at most a quarter."""
        if not self.static:
            return num_tokens
        step = max(_LEAST_KEY_LENGTH, 1 << max(0, num_tokens.bit_length() - 3))
        return min(-(-num_tokens // step) * step, capacity)

    def _chunk_length(self, num_tokens: int) -> int:
        if not self.static:
            return num_tokens
        index = bisect_left(_CHUNK_LENGTHS, num_tokens)
        return _CHUNK_LENGTHS[index] if index < len(_CHUNK_LENGTHS) else num_tokens
