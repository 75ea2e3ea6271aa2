"""Memory stays level while requests come and go."""

from __future__ import annotations

import mlx.core as mx
import pytest

import tiny_models
from engine_driver import MODES, make_core, request, run, solo
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec


@pytest.mark.parametrize("mode", ["fused", "fused for Metal", "fused for CUDA", "split"])
@pytest.mark.parametrize("overlap", [False, True])
def test_500_joins_and_leaves(mode, overlap):
    model = tiny_models.make("llama")
    num_bytes = slot_spec(layer_shapes(model)).bytes_per_token
    budget = 12 * 512 * num_bytes
    core = make_core(model, overlap=overlap, kv_budget_bytes=budget, **MODES[mode])
    seen = []
    for batch in range(10):
        requests = [
            request(f"{batch} {i}", [batch, i, *([7] * (5 + 11 * i % 90))], max_tokens=1 + i % 7)
            for i in range(50)
        ]
        run(core, requests, steps_between=1)
        mx.synchronize()
        seen.append(mx.get_active_memory())
    assert core.stats().kv_used_bytes == 0
    # What is kept of prompts fills its share of the budget early on.
    assert max(seen[5:]) <= 1.02 * max(seen[:5])
    assert max(seen) - seen[0] <= budget


def test_at_rest_nothing_is_held_for_what_may_come():
    core = make_core(tiny_models.make("llama"), mode="fused")
    run(core, [request("r", [1] * 100, skip_reading_prefix_cache=True)])
    mx.synchronize()
    assert mx.get_cache_memory() > 0
    assert core.runner.kv.held_bytes > 0
    core.rest()
    assert mx.get_cache_memory() == 0
    assert core.runner.kv.held_bytes == 0
    assert core.runner._arrays.arrays == []


def test_a_request_after_another_finds_its_slot_made(monkeypatch):
    core = make_core(tiny_models.make("llama"), mode="fused")
    run(core, [request("first", [1] * 100)])
    resized = []
    monkeypatch.setattr(core.runner._arrays, "_resize", lambda *resize: resized.append(resize))
    (answer,) = run(core, [request("next", [2] * 90)]).values()
    assert resized == []
    assert answer.token_ids == solo(tiny_models.make("llama"), request("alone", [2] * 90)).token_ids


def test_after_a_failed_step_slots_are_made_anew(monkeypatch):
    core = make_core(tiny_models.make("llama"), mode="fused")
    run(core, [request("first", [1] * 100)])
    compute, calls = core.runner._compute, []

    def compute_from_the_second_on(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return compute(*arguments)

    monkeypatch.setattr(core.runner, "_compute", compute_from_the_second_on)
    (answer,) = run(core, [request("next", [2] * 90)]).values()
    assert answer.token_ids == solo(tiny_models.make("llama"), request("alone", [2] * 90)).token_ids


def test_what_is_kept_of_prompts_is_kept_once():
    """A copy that is not made at once holds all slots as they were, and each later copy holds them again."""
    model = tiny_models.make("llama")
    core = make_core(model, mode="fused", max_num_batched_tokens=256)
    num_bytes = core.runner.kv.spec.bytes_per_token
    run(core, [request("warm up", [1] * 130, max_tokens=2)])
    mx.synchronize()
    before = mx.get_active_memory()
    for i in range(20):
        run(core, [request(str(i), [i, *([3] * 129)], max_tokens=2)])
    mx.synchronize()
    kept = 20 * 128 * num_bytes
    assert core.runner.kv.prefixes.num_bytes >= kept
    assert mx.get_active_memory() - before <= 1.2 * kept + 100_000
