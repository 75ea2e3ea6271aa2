from __future__ import annotations

from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup


def test_a_request_costs_whole_steps_windows_at_most_their_size_and_its_state():
    spec = KVCacheSpec((KVLayerGroup(10), KVLayerGroup(1, max_tokens=300)), state_bytes=7)
    assert spec.num_bytes(1) == 10 * 256 + 256 + 7
    assert spec.num_bytes(257) == 10 * 512 + 300 + 7
    assert spec.exact_bytes(257) == 10 * 257 + 257 + 7
    assert spec.exact_bytes(400) == 10 * 400 + 300 + 7
