from __future__ import annotations

from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup, RectangularKVCacheManager
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams


def make_request(num_tokens: int) -> Request:
    return Request("r", [1] * num_tokens, SamplingParams(), max_tokens=1, seed=0)


def test_a_request_costs_whole_steps_windows_at_most_their_size_and_its_state():
    spec = KVCacheSpec((KVLayerGroup(10), KVLayerGroup(1, max_tokens=300)), state_bytes=7)
    assert spec.num_bytes(1) == 10 * 256 + 256 + 7
    assert spec.num_bytes(257) == 10 * 512 + 300 + 7


def test_every_row_costs_as_much_as_the_longest():
    manager = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), budget_bytes=2 * 512)
    short, long = make_request(100), make_request(512)
    assert manager.allocate(short)
    assert manager.used_bytes == 256
    assert manager.allocate(long)
    assert manager.used_bytes == 2 * 512
    long.token_ids.append(1)
    assert not manager.allocate(long)
    assert manager.used_bytes == 2 * 512
    manager.free(long)
    manager.free(long)
    assert manager.used_bytes == 256


def test_a_refused_newcomer_holds_nothing():
    manager = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), budget_bytes=256)
    assert not manager.allocate(make_request(257))
    assert manager.used_bytes == 0


def test_max_num_tokens_is_what_one_request_can_hold():
    manager = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), budget_bytes=1000)
    assert manager.max_num_tokens(10_000) == 768
    assert manager.max_num_tokens(100) == 100
