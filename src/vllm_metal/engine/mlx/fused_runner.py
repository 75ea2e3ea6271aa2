"""Runs a step as one forward of token rows over slots; see `fused.py`. Lives on the engine thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vllm_metal.engine.mlx import adapters, device, head, linear, sdpa
from vllm_metal.engine.mlx.fused import LayerKV, StepPlan, StepShape
from vllm_metal.engine.mlx.prompt_logprobs import StepPromptLogprobs
from vllm_metal.engine.mlx.sampler import Sampler
from vllm_metal.engine.mlx.slot_arrays import LayerShape, SlotArrays
from vllm_metal.engine.mlx.static_shapes import StaticShapes
from vllm_metal.engine.mlx.step import Step
from vllm_metal.engine.mlx.step_planner import StepPlanner
from vllm_metal.engine.mlx.step_tokens import StepTokens
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import SchedulerOutput
from vllm_metal.engine.slot_kv_cache_manager import SLOT_COUNTS, SlotKVCacheManager

#: Traces kept. More shapes than that are not met again soon.
_MOST_TRACES = 128

#: From token ids, places, perhaps the rows to project, and the arrays of pools, to logits and those arrays.
_Trace = Callable[[list[mx.array], list[mx.array]], list[mx.array]]


class FusedRunner:
    """A step whose shape is `static` and was met before is traced, then replayed."""

    def __init__(
        self,
        model: Any,
        layers: list[LayerShape],
        kv: SlotKVCacheManager,
        sampler: Sampler,
        *,
        static: StaticShapes,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.static = static
        self._layers = layers
        if mx.cuda.is_available():
            linear.flatten_rows(model)
        self._adapters = adapters.of(model)
        self._selection = head.select_rows(model)
        self._arrays = SlotArrays(layers)
        self._previous: Step | None = None
        self._planner = StepPlanner(kv, static=static)
        self._traces: dict[tuple[StepShape, int], _Trace | None] = {}
        sdpa.install()

    def launch(self, output: SchedulerOutput) -> Step:
        self._arrays.apply(self.kv.take_changes())
        scheduled = output.num_scheduled_tokens
        prompt_logprobs = StepPromptLogprobs(scheduled)
        if not scheduled:
            return Step(self.sampler, None, [], prompt_logprobs, self._arrays.arrays)
        tokens = StepTokens(self._previous.sampled if self._previous else None)
        shape = self._planner.plan(scheduled, tokens)
        rows: list[Request | None] = [None for _ in range(len(tokens))]
        for request, num_tokens in scheduled.items():
            if num_tokens == request.num_remaining_tokens:
                rows[tokens.offsets[request] + num_tokens - 1] = request
        asked = prompt_logprobs.rows(tokens.offsets)
        selected = None
        if shape.openings or shape.chunks or asked:
            selected, rows = self._select(rows, asked)
        logits = self._compute(shape, tokens, selected)
        prompt_logprobs.take(logits[len(rows) :])
        self._previous = Step(self.sampler, logits[: len(rows)], rows, prompt_logprobs, self._arrays.arrays)
        return self._previous

    def reset(self) -> None:
        self.kv.forget_prefixes()
        self.kv.trim()
        self.kv.take_changes()
        self._arrays = SlotArrays(self._layers)
        self._previous = None
        self.sampler.reset()
        mx.clear_cache()

    def rest(self) -> None:
        self._arrays.apply(self.kv.take_changes())
        self.sampler.reset()
        mx.clear_cache()

    def close(self) -> None:
        self.reset()
        self._traces.clear()
        self.model = None
        device.leave_thread()

    def _select(self, rows: list[Request | None], asked: list[int]) -> tuple[mx.array, list[Request | None]]:
        """The token rows to project, and whom they sample for; some row or other if nobody samples.

        Those that are only asked about come last.
        """
        selected = [row for row, request in enumerate(rows) if request is not None] or [0]
        requests = [rows[row] for row in selected]
        if self.static is StaticShapes.ALL:
            padding = SLOT_COUNTS[bisect_left(SLOT_COUNTS, len(selected))] - len(selected)
            selected += padding * [0]
            requests += padding * [None]
        return mx.array(selected + asked, mx.int32), requests

    def _compute(self, shape: StepShape, tokens: StepTokens, selected: mx.array | None) -> mx.array:
        """Logits [selected rows, or all token rows, vocabulary]."""
        token_ids, places = tokens.to_device()
        inputs = [token_ids, places] if selected is None else [token_ids, places, selected]
        trace = self._trace(shape, 0 if selected is None else len(selected))
        if trace is None:
            return self._forward(shape, inputs, self._arrays)
        logits, *arrays = trace(inputs, self._arrays.take(shape.capacities))
        self._arrays.put(shape.capacities, arrays)
        return logits

    def _trace(self, shape: StepShape, num_selected: int) -> _Trace | None:
        """None for a shape that is met for the first time: to build a graph twice pays only if it recurs."""
        if not self._recurs(shape):
            return None
        key = shape, num_selected
        if key not in self._traces:
            if len(self._traces) == _MOST_TRACES:
                self._traces.clear()
            self._traces[key] = None
        elif self._traces[key] is None:

            def step(inputs: list[mx.array], pools: list[mx.array]) -> list[mx.array]:
                arrays = SlotArrays(self._layers)
                arrays.put(shape.capacities, pools)
                logits = self._forward(shape, inputs, arrays)
                return [logits, *arrays.take(shape.capacities)]

            self._traces[key] = mx.compile(step)
        return self._traces[key]

    def _recurs(self, shape: StepShape) -> bool:
        """That of a chunk seldom does: each looks at more keys than the one before."""
        if self.static is StaticShapes.NONE or shape.chunks:
            return False
        return self.static is StaticShapes.ALL or not shape.openings

    def _forward(self, shape: StepShape, inputs: list[mx.array], arrays: SlotArrays) -> mx.array:
        token_ids, places, *selected = inputs
        plan = StepPlan(shape, *places)
        caches = [LayerKV(plan, arrays, layer) for layer in range(len(self._layers))]
        with self._adapters.used_by(plan.adapters):
            if not selected:
                logits: mx.array = self.model(token_ids[:, None], cache=caches)
                return logits[:, 0]
            with self._selection.only(selected[0]):
                logits = self.model(token_ids[:, None], cache=caches)
        return logits[:, 0] if self._selection.applied else logits[selected[0], 0]
