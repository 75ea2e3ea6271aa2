"""Which rows attend together, and that steps come in few shapes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

import tiny_models
from engine_driver import make_core, request, run
from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.mlx.fused import Chunk, DecodeGroup, Opening, StepShape
from vllm_metal.engine.mlx.step_planner import StepPlanner
from vllm_metal.engine.mlx.step_tokens import StepTokens
from vllm_metal.engine.request import Request
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager


@pytest.fixture
def kv() -> SlotKVCacheManager:
    spec = KVCacheSpec((KVLayerGroup(1),))
    return SlotKVCacheManager(spec, 1 << 40, max_num_seqs=8, max_model_len=8192)


def prompt(kv: SlotKVCacheManager, name: str, num_tokens: int, *, computed: int = 0) -> Request:
    new = request(name, num_tokens * [1])
    new.num_computed_tokens = computed
    assert kv.allocate(new)
    return new


def plan(kv: SlotKVCacheManager, scheduled: dict[Request, int], *, static: bool) -> tuple[StepShape, Any]:
    tokens = StepTokens(None)
    shape = StepPlanner(kv, static=static).plan(scheduled, tokens)
    parts = shape.parts
    assert [part.offset for part in parts] == [
        sum(each.num_rows for each in parts[:i]) for i in range(len(parts))
    ]
    assert len(tokens) == sum(part.num_rows for part in parts)
    return shape, tokens.to_device()[1].tolist()


def test_prompts_that_begin_are_packed(kv: SlotKVCacheManager) -> None:
    scheduled = {prompt(kv, "a", 20): 20, prompt(kv, "b", 15): 15, prompt(kv, "c", 3000): 2000}
    shape, (positions, slots, starts) = plan(kv, scheduled, static=True)
    assert shape.openings == (Opening(2048, 64, 0, True), Opening(4096, 2048, 64, False))
    assert positions[:35] == [*range(20), *range(15)]
    assert slots[:35] == 20 * [0] + 15 * [1]
    assert starts[:35] == 20 * [0] + 15 * [20]


def test_padding_goes_where_the_last_prompt_goes_on(kv: SlotKVCacheManager) -> None:
    _, (positions, slots, starts) = plan(kv, {prompt(kv, "a", 20): 20, prompt(kv, "b", 15): 15}, static=True)
    assert positions[35:] == [*range(15, 15 + 29)]
    assert set(slots[35:]) == {1}
    assert set(starts[35:]) == {20}


def test_padding_ends_with_the_slot(kv: SlotKVCacheManager) -> None:
    new = prompt(kv, "a", 4000, computed=3700)
    shape, (positions, *_) = plan(kv, {new: 300}, static=True)
    assert shape.chunks == (Chunk(4096, 396, 0, 4096, False),)
    assert positions == [*range(3700, 4096)]


def test_packs_are_bounded(kv: SlotKVCacheManager) -> None:
    scheduled = {prompt(kv, str(i), 900): 900 for i in range(5)}
    shape, _ = plan(kv, scheduled, static=True)
    assert [(each.num_rows, each.is_packed) for each in shape.openings] == [
        (2048, True),
        (2048, True),
        (1024, False),
    ]


def test_a_prompt_that_goes_on_attends_to_its_slot(kv: SlotKVCacheManager) -> None:
    new = prompt(kv, "a", 700, computed=300)
    shape, (positions, *_) = plan(kv, {new: 400}, static=True)
    assert shape == StepShape((), (), (Chunk(2048, 512, 0, 812, True),))
    assert positions == [*range(300, 812)]
    shape, _ = plan(kv, {new: 400}, static=False)
    assert shape.chunks == (Chunk(2048, 400, 0, 700, True),)


def test_small_chunks_look_at_a_number_of_keys_that_recurs(kv: SlotKVCacheManager) -> None:
    shape, _ = plan(kv, {prompt(kv, "a", 700, computed=300): 200}, static=True)
    assert shape.chunks == (Chunk(2048, 256, 0, 768, False),)


def test_on_a_cpu_nothing_is_padded(kv: SlotKVCacheManager) -> None:
    decoding = prompt(kv, "d", 11, computed=10)
    scheduled = {decoding: 1, prompt(kv, "a", 20): 20, prompt(kv, "b", 15): 15}
    shape, _ = plan(kv, scheduled, static=False)
    assert shape == StepShape(
        (DecodeGroup(2048, 3, 0, 11),), (Opening(2048, 20, 3, False), Opening(2048, 15, 23, False))
    )


def test_shapes_that_recur_are_traced_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(tiny_models.make("llama"), mode="fused", static=True)
    traced = []
    compile_ = mx.compile
    monkeypatch.setattr(mx, "compile", lambda function: traced.append(function) or compile_(function))
    answers = []
    for turn in range(4):
        # Lengths differ, and who begins beside whom: none of that is a new shape.
        prompts = [[turn + 1] * (5 + turn), [turn + 9] * (8 - turn)]
        new = [request(f"{turn}-{i}", each, max_tokens=6) for i, each in enumerate(prompts)]
        answers.append(run(core, new))
        assert len(traced) <= 2, "one of decoding, one with prompts"
    assert len(traced) == 2
    assert all(len(answer.token_ids) == 6 for turn in answers for answer in turn.values())
