"""Which rows attend together, and that steps come in few shapes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

import tiny_models
from engine_driver import make_core, request, run
from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.mlx import device
from vllm_metal.engine.mlx.fused import Chunk, DecodeGroup, Opening, StepShape
from vllm_metal.engine.mlx.static_shapes import StaticShapes
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


def plan(
    kv: SlotKVCacheManager, scheduled: dict[Request, int], *, static: StaticShapes
) -> tuple[StepShape, Any]:
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
    shape, (positions, slots, starts) = plan(kv, scheduled, static=StaticShapes.ALL)
    assert shape.openings == (Opening(2048, 64, 0, True), Opening(4096, 2048, 64, False))
    assert positions[:35] == [*range(20), *range(15)]
    assert slots[:35] == 20 * [0] + 15 * [1]
    assert starts[:35] == 20 * [0] + 15 * [20]


def test_padding_goes_where_the_last_prompt_goes_on(kv: SlotKVCacheManager) -> None:
    scheduled = {prompt(kv, "a", 20): 20, prompt(kv, "b", 15): 15}
    _, (positions, slots, starts) = plan(kv, scheduled, static=StaticShapes.ALL)
    assert positions[35:] == [*range(15, 15 + 29)]
    assert set(slots[35:]) == {1}
    assert set(starts[35:]) == {20}


def test_padding_ends_with_the_slot(kv: SlotKVCacheManager) -> None:
    new = prompt(kv, "a", 4000, computed=3700)
    shape, (positions, *_) = plan(kv, {new: 300}, static=StaticShapes.ALL)
    assert shape.chunks == (Chunk(4096, 396, 0, 4096, False),)
    assert positions == [*range(3700, 4096)]


def test_packs_are_bounded(kv: SlotKVCacheManager) -> None:
    scheduled = {prompt(kv, str(i), 900): 900 for i in range(5)}
    shape, _ = plan(kv, scheduled, static=StaticShapes.ALL)
    assert [(each.num_rows, each.is_packed) for each in shape.openings] == [
        (2048, True),
        (2048, True),
        (1024, False),
    ]


def test_a_prompt_that_goes_on_attends_to_its_slot(kv: SlotKVCacheManager) -> None:
    new = prompt(kv, "a", 700, computed=300)
    shape, (positions, *_) = plan(kv, {new: 400}, static=StaticShapes.ALL)
    assert shape == StepShape((), (), (Chunk(2048, 512, 0, 812, True),))
    assert positions == [*range(300, 812)]
    shape, _ = plan(kv, {new: 400}, static=StaticShapes.NONE)
    assert shape.chunks == (Chunk(2048, 400, 0, 700, True),)


def test_small_chunks_look_at_a_number_of_keys_that_recurs(kv: SlotKVCacheManager) -> None:
    shape, _ = plan(kv, {prompt(kv, "a", 700, computed=300): 200}, static=StaticShapes.ALL)
    assert shape.chunks == (Chunk(2048, 256, 0, 768, False),)


def test_on_a_cpu_nothing_is_padded(kv: SlotKVCacheManager) -> None:
    decoding = prompt(kv, "d", 11, computed=10)
    scheduled = {decoding: 1, prompt(kv, "a", 20): 20, prompt(kv, "b", 15): 15}
    shape, _ = plan(kv, scheduled, static=StaticShapes.NONE)
    assert shape == StepShape(
        (DecodeGroup(2048, 3, 0, 11),), (Opening(2048, 20, 3, False), Opening(2048, 15, 23, False))
    )


def test_on_metal_prompts_have_no_rows_but_their_own(kv: SlotKVCacheManager) -> None:
    shape, (positions, *_) = plan(kv, {prompt(kv, "a", 300): 300}, static=StaticShapes.DECODES)
    assert shape == StepShape((), (Opening(2048, 300, 0, False),))
    assert positions == [*range(300)]
    goes_on = prompt(kv, "b", 300, computed=100)
    scheduled = {goes_on: 200, prompt(kv, "c", 20): 20, prompt(kv, "d", 15): 15}
    shape, _ = plan(kv, scheduled, static=StaticShapes.DECODES)
    assert shape == StepShape((), (Opening(2048, 35, 0, True),), (Chunk(2048, 200, 35, 300, True),))


@pytest.mark.parametrize(("num_requests", "num_rows"), [(3, 3), (12, 12), (13, 16), (17, 24)])
def test_on_metal_few_rows_decode_alone_and_many_with_their_whole_pool(
    kv: SlotKVCacheManager, num_requests: int, num_rows: int
) -> None:
    scheduled = {prompt(kv, str(i), 11, computed=10): 1 for i in range(num_requests)}
    shape, _ = plan(kv, scheduled, static=StaticShapes.DECODES)
    assert shape == StepShape((DecodeGroup(2048, num_rows, 0, 256),))


@pytest.mark.parametrize(
    ("static", "num_traces"),
    [(StaticShapes.NONE, 0), (StaticShapes.DECODES, 1), (StaticShapes.ALL, 2)],
    ids=lambda param: getattr(param, "name", ""),
)
def test_shapes_that_recur_are_traced_and_replayed(
    monkeypatch: pytest.MonkeyPatch, static: StaticShapes, num_traces: int
) -> None:
    core = make_core(tiny_models.make("llama"), mode="fused", static=static)
    traced = []
    compile_ = mx.compile
    monkeypatch.setattr(mx, "compile", lambda function: traced.append(function) or compile_(function))
    answers = []
    for turn in range(4):
        # Lengths differ, and who begins beside whom: none of that is a new shape.
        prompts = [[turn + 1] * (5 + turn), [turn + 9] * (8 - turn)]
        new = [request(f"{turn}-{i}", each, max_tokens=6) for i, each in enumerate(prompts)]
        answers.append(run(core, new))
        assert len(traced) <= num_traces, "one of decoding, one with prompts"
    assert len(traced) == num_traces
    assert all(len(answer.token_ids) == 6 for turn in answers for answer in turn.values())


@pytest.mark.parametrize(
    ("is_cpu", "has_cuda", "expected"),
    [
        (True, True, StaticShapes.NONE),
        (False, False, StaticShapes.DECODES),
        (False, True, StaticShapes.ALL),
    ],
)
def test_the_device_says_what_is_static(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, has_cuda: bool, expected: StaticShapes
) -> None:
    monkeypatch.setattr(device, "is_cpu", lambda: is_cpu)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: has_cuda)
    assert StaticShapes.of_device() is expected
