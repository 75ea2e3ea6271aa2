"""The least that decoding takes: forward, argmax, one step ahead. An engine can hardly be faster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from vllm_metal.engine.core import ModelRunner
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.mlx.fused import Chunk, DecodeGroup, LayerKV, Opening, StepPlan, StepShape
from vllm_metal.engine.mlx.fused_runner import FusedRunner
from vllm_metal.engine.mlx.layer_shapes import layer_shapes
from vllm_metal.engine.mlx.slot_arrays import SlotArrays
from vllm_metal.engine.mlx.split_runner import SplitRunner
from vllm_metal.engine.mlx.static_shapes import StaticShapes
from vllm_metal.engine.slot_kv_cache_manager import Resize

#: Most tokens of one forward while prompts are prefilled.
_PREFILL_TOKENS = 2048
_KEY_STEP = 256


class BareLoop(ABC):
    """Greedy decoding of prompts of one length."""

    def prefill(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Compute all but the last token of `prompts`, with room for `num_tokens` of each answer."""
        self._last = [prompt[-1] for prompt in prompts]
        self._position = len(prompts[0]) - 1
        self._prefill([prompt[:-1] for prompt in prompts], len(prompts[0]) + num_tokens)

    def decode(self, num_tokens: int) -> Iterator[list[int]]:
        """The token ids [prompts] of each step, read when the next one is launched."""
        pending = self._launch(mx.array(self._last))
        for _ in range(num_tokens - 1):
            following = self._launch(pending)
            yield _ids(pending)
            pending = following
        yield _ids(pending)

    @abstractmethod
    def drop(self) -> None:
        """Let go of the KV."""

    @abstractmethod
    def _prefill(self, prompts: list[list[int]], num_tokens: int) -> None: ...

    @abstractmethod
    def _step(self, token_ids: mx.array) -> tuple[mx.array, list[Any]]:
        """The next token ids, and what else is to be evaluated with them."""

    def _launch(self, token_ids: mx.array) -> mx.array:
        token_ids, kept = self._step(token_ids)
        self._position += 1
        mx.async_eval(token_ids, kept)
        return token_ids


class SlotLoop(BareLoop):
    """Over the same slots as `runner`'s, all of them taken, and traced if its steps that decode are."""

    def __init__(self, runner: FusedRunner) -> None:
        layers = layer_shapes(runner.model)
        assert layers is not None
        self._runner = runner
        self._layers = layers
        self._traces: dict[DecodeGroup, Callable[..., Any]] = {}
        self.drop()

    def drop(self) -> None:
        self._arrays = SlotArrays(self._layers)

    def _prefill(self, prompts: list[list[int]], num_tokens: int) -> None:
        self._num_rows = len(prompts)
        self._capacity = next(capacity for capacity in self._runner.kv.pools if capacity >= num_tokens)
        self._arrays.apply([Resize(self._capacity, self._num_rows)])
        num_prompt_tokens = len(prompts[0])
        step = max(1, _PREFILL_TOKENS // max(1, num_prompt_tokens))
        for first in range(0, self._num_rows, step):
            rows = range(first, min(first + step, self._num_rows))
            for start in range(0, num_prompt_tokens, _PREFILL_TOKENS):
                end = min(start + _PREFILL_TOKENS, num_prompt_tokens)
                self._prefill_chunks(prompts, rows, start, end)
        mx.eval(self._arrays.arrays)

    def _prefill_chunks(self, prompts: list[list[int]], rows: range, start: int, end: int) -> None:
        length = end - start
        offsets = [i * length for i in range(len(rows))]
        if start == 0:
            openings = tuple(Opening(self._capacity, length, offset, False) for offset in offsets)
            shape = StepShape((), openings)
        else:
            shape = StepShape(
                (), (), tuple(Chunk(self._capacity, length, offset, end, True) for offset in offsets)
            )
        token_ids = mx.array([token_id for row in rows for token_id in prompts[row][start:end]])
        positions = mx.array(len(rows) * list(range(start, end)), mx.int32)
        slots = mx.repeat(mx.array(list(rows), mx.int32), length)
        # The logits are never looked at, so the vocabulary projection is never computed.
        self._forward(token_ids, StepPlan(shape, positions, slots, slots), self._arrays)
        mx.async_eval(self._arrays.arrays)

    def _step(self, token_ids: mx.array) -> tuple[mx.array, list[Any]]:
        positions = mx.full((self._num_rows,), self._position, mx.int32)
        num_keys = self._position + 1
        if self._runner.static is StaticShapes.NONE:
            group = DecodeGroup(self._capacity, self._num_rows, 0, num_keys)
            return self._decode(group, token_ids, positions, self._arrays), self._arrays.arrays
        num_keys = min(-(-num_keys // _KEY_STEP) * _KEY_STEP, self._capacity)
        group = DecodeGroup(self._capacity, self._num_rows, 0, num_keys)
        if group not in self._traces:
            self._traces[group] = self._trace(group)
        capacities = [self._capacity]
        token_ids, *flat = self._traces[group](token_ids, positions, *self._arrays.take(capacities))
        self._arrays.put(capacities, flat)
        return token_ids, flat

    def _trace(self, group: DecodeGroup) -> Callable[..., Any]:
        def decode(token_ids: mx.array, positions: mx.array, *flat: mx.array) -> list[mx.array]:
            arrays = SlotArrays(self._layers)
            arrays.put([group.capacity], flat)
            return [self._decode(group, token_ids, positions, arrays), *arrays.take([group.capacity])]

        traced: Callable[..., Any] = mx.compile(decode)
        return traced

    def _decode(
        self, group: DecodeGroup, token_ids: mx.array, positions: mx.array, arrays: SlotArrays
    ) -> mx.array:
        logits = self._forward(
            token_ids, StepPlan(StepShape((group,)), positions, positions, positions), arrays
        )
        return mx.argmax(logits[:, 0], axis=-1)

    def _forward(self, token_ids: mx.array, plan: StepPlan, arrays: SlotArrays) -> mx.array:
        caches = [LayerKV(plan, arrays, layer) for layer in range(len(self._layers))]
        logits: mx.array = self._runner.model(token_ids[:, None], cache=caches)
        return logits


class MlxLmLoop(BareLoop):
    """Over mlx-lm's own batch caches."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.drop()

    def drop(self) -> None:
        self._caches: kv_cache.LayerCaches = []

    def _prefill(self, prompts: list[list[int]], num_tokens: int) -> None:
        self._caches = kv_cache.merge([kv_cache.new_caches(self._model) for _ in prompts])
        token_ids = mx.array(prompts, mx.int32)
        step = max(1, _PREFILL_TOKENS // len(prompts))
        for start in range(0, token_ids.shape[1], step):
            self._model(token_ids[:, start : start + step], cache=self._caches)
            mx.eval([cache.state for cache in self._caches])

    def _step(self, token_ids: mx.array) -> tuple[mx.array, list[Any]]:
        logits = self._model(token_ids[:, None], cache=self._caches)
        return mx.argmax(logits[:, -1], axis=-1), [cache.state for cache in self._caches]


def bare_loops(runner: ModelRunner) -> dict[str, BareLoop]:
    """Those that the model of `runner` can be run in, by name."""
    loops: dict[str, BareLoop] = {}
    if isinstance(runner, FusedRunner):
        loops["slot_loop"] = SlotLoop(runner)
    if isinstance(runner, FusedRunner | SplitRunner) and kv_cache.can_merge(
        kv_cache.new_caches(runner.model)
    ):
        loops["mlx_lm_loop"] = MlxLmLoop(runner.model)
    return loops


def _ids(token_ids: mx.array) -> list[int]:
    return token_ids.tolist()  # type: ignore[return-value]
