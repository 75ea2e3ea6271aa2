"""What a model keeps for each token in each layer."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache

from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.mlx.slot_arrays import LayerShape


def slot_spec(layers: list[LayerShape]) -> KVCacheSpec:
    """What a token costs in a slot: every layer keeps it, windows or not."""
    num_bytes = sum(
        layer.num_kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.size for layer in layers
    )
    return KVCacheSpec((KVLayerGroup(num_bytes),))


def layer_shapes(model: Any) -> list[LayerShape] | None:
    """None for a model that keeps anything but keys and values, which slots cannot hold."""
    caches = kv_cache.used_caches(model)
    if not all(type(cache) in (KVCache, RotatingKVCache) for cache in caches):
        return None
    if any(cache.empty() or getattr(cache, "keep", 0) for cache in caches):
        return None
    return [
        LayerShape(
            num_kv_heads=cache.keys.shape[1],
            key_dim=cache.keys.shape[3],
            value_dim=cache.values.shape[3],
            dtype=cache.keys.dtype,
            window=getattr(cache, "max_size", None),
        )
        for cache in caches
    ]
