"""Memory stays level while requests come and go."""

from __future__ import annotations

import mlx.core as mx
import pytest

import tiny_models
from engine_driver import make_core, request, run
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec


@pytest.mark.parametrize(
    "how", [{"mode": "fused"}, {"mode": "fused", "static": True}, {"mode": "split"}], ids=str
)
@pytest.mark.parametrize("overlap", [False, True])
def test_500_joins_and_leaves(how, overlap):
    model = tiny_models.make("llama")
    num_bytes = slot_spec(layer_shapes(model)).bytes_per_token
    budget = 12 * 512 * num_bytes
    core = make_core(model, overlap=overlap, kv_budget_bytes=budget, **how)
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
    run(core, [request("r", [1] * 100)])
    mx.synchronize()
    assert mx.get_cache_memory() > 0
    core.rest()
    assert mx.get_cache_memory() == 0


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
