"""States kept in split and serial mode: exact copies of what a request had, and no bytes more."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import tiny_models
from engine_driver import make_core, request, run
from vllm_metal.engine.mlx import kv_cache


@pytest.fixture(scope="module", params=tiny_models.CONFIGS)
def model(request):
    return tiny_models.make(request.param)


def _prompt(length: int, start: int = 0) -> list[int]:
    return [(7 * i + start) % tiny_models.VOCAB_SIZE for i in range(length)]


def _arrays(caches):
    return [leaf for _, leaf in tree_flatten(kv_cache.states(caches)) if isinstance(leaf, mx.array)]


@pytest.mark.parametrize("chunks", [(70,), (64, 1, 5), (300,), (200, 1, 99)])
def test_a_snapshot_is_as_large_as_it_is_counted_and_never_changes(model, chunks):
    caches = kv_cache.new_caches(model)
    tokens = _prompt(sum(chunks) + 3)
    start = 0
    for length in chunks:
        model(mx.array([tokens[start : start + length]]), cache=caches)
        start += length
    snapshot = kv_cache.snapshot(caches)
    assert sum(array.nbytes for array in _arrays(snapshot)) == kv_cache.measure(model).exact_bytes(start)
    before = [mx.array(array) for array in _arrays(snapshot)]
    mx.eval(before)
    following = mx.array([tokens[start:]])
    expected = model(following, cache=caches)
    for _ in range(2):
        assert mx.allclose(model(following, cache=kv_cache.restored(snapshot)), expected, atol=1e-5)
    after = _arrays(snapshot)
    assert all(mx.array_equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("mode", ["split", "serial"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_a_conversation_goes_on_from_where_it_was(model, mode, overlap):
    """Beside others, whose tokens must not change either."""
    core = make_core(model, mode=mode, overlap=overlap, max_num_batched_tokens=48)
    prompt = _prompt(50)
    seen = 0
    for turn in range(4):
        prompt += _prompt(60, start=turn)
        asked = request("turn", list(prompt), max_tokens=16)
        other = request("other", _prompt(40, start=9 * turn), max_tokens=9)
        answers = run(core, [asked, other], steps_between=turn)
        fresh = run(make_core(model, mode=mode), [request("turn", list(prompt), max_tokens=16)])
        assert answers["turn"].token_ids == fresh["turn"].token_ids
        if turn:
            assert answers["turn"].last.num_cached_tokens > seen
        seen = answers["turn"].last.num_cached_tokens
        prompt += answers["turn"].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_memory_is_level_over_300_requests(name, overlap):
    model = tiny_models.make(name)
    spec = kv_cache.measure(model)
    budget = 24 * spec.num_bytes(256)
    core = make_core(model, overlap=overlap, kv_budget_bytes=budget, max_num_batched_tokens=256)
    seen = []
    for batch in range(10):
        requests = [
            request(f"{batch} {i}", [batch % 3, i % 7] * 40 + [i] * (i % 50), max_tokens=1 + i % 9)
            for i in range(30)
        ]
        run(core, requests, steps_between=1)
        core.runner.kv.check()
        mx.synchronize()
        seen.append(mx.get_active_memory())
    assert core.stats().kv_used_bytes == 0
    assert core.scheduler.kv.snapshots.num_bytes > 0
    assert max(seen[5:]) <= 1.02 * max(seen[:5])
    assert max(seen) - seen[0] <= budget


def test_what_is_kept_is_kept_once():
    """A copy that is not made at once would hold what it was made from."""
    model = tiny_models.make("qwen3_next")
    core = make_core(model, max_num_batched_tokens=256)
    run(core, [request("warm up", [1] * 130, max_tokens=2)])
    mx.synchronize()
    before, kept_before = mx.get_active_memory(), core.runner.kv.snapshots.num_bytes
    for i in range(20):
        run(core, [request(str(i), [i, *([3] * 149)], max_tokens=2)])
    mx.synchronize()
    kept = core.runner.kv.snapshots.num_bytes - kept_before
    assert kept == 20 * kv_cache.measure(model).exact_bytes(128)
    assert mx.get_active_memory() - before <= 1.2 * kept + 100_000
