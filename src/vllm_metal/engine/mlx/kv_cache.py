"""KV of prompts under way and of the decode batch, on mlx-lm's cache classes.

A prompt is prefilled unpadded on caches of its own; then its caches join the batch's, layer by layer. A batch
cache is left-padded: joining and leaving copy the whole batch once.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.request import Request

#: One mlx-lm cache object a layer.
LayerCaches = list[Any]


def new_caches(model: Any) -> LayerCaches:
    """Empty caches for one sequence."""
    caches: LayerCaches = make_prompt_cache(model)
    return caches


def can_merge(caches: LayerCaches) -> bool:
    """Whether caches of several sequences can be made one batch."""
    return all(hasattr(cache, "merge") for cache in caches)


def merge(rows: list[LayerCaches]) -> LayerCaches:
    """One batch of several sequences' caches, in order."""
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


def snapshot(caches: LayerCaches) -> LayerCaches:
    """Copies of one sequence's caches as they are, without room for more, and without views of others."""
    return [_snapshot(cache) for cache in caches]


def _snapshot(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*map(_snapshot, cache.caches))
    if cache.empty():
        return copy.deepcopy(cache)
    if isinstance(cache, RotatingKVCache):
        # After a chunk it holds more than its window; a batch of one does not.
        return type(cache).merge([cache]).extract(0)
    twin = copy.deepcopy(cache)
    state = cache.state
    if hasattr(cache, "keys_and_values"):
        state = (*cache.keys_and_values(), *state[2:])
    # Adding nothing always makes a new array; what is contiguous already may be part of a larger one.
    twin.state = tree_map(lambda leaf: leaf + 0 if isinstance(leaf, mx.array) else leaf, state)
    return twin


def restored(snapshot: LayerCaches) -> LayerCaches:
    """Caches that go on from a snapshot, which stays as it is: arrays are shared until written."""
    return copy.deepcopy(snapshot)


def states(caches: LayerCaches) -> list[Any]:
    """All arrays of `caches`, to be evaluated."""
    return [cache.state for cache in caches]


def used_caches(model: Any) -> LayerCaches:
    """Caches that one token has passed through, so that they have their shapes."""
    caches = new_caches(model)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches), states(caches))
    return caches


def measure(model: Any) -> KVCacheSpec:
    """What one request of `model` costs."""
    bytes_per_token: dict[int | None, int] = {}
    state_bytes = 0
    for cache in _leaves(used_caches(model)):
        keys = getattr(cache, "keys", None)
        if keys is None:
            state_bytes += cache.nbytes
        else:
            window = getattr(cache, "max_size", None)
            per_token = cache.nbytes // keys.shape[-2]
            bytes_per_token[window] = bytes_per_token.get(window, 0) + per_token
    groups = tuple(KVLayerGroup(total, window) for window, total in bytes_per_token.items())
    return KVCacheSpec(groups, state_bytes)


def _leaves(caches: LayerCaches) -> LayerCaches:
    """`CacheList`s flattened."""
    return [leaf for cache in caches for leaf in getattr(cache, "caches", (cache,))]


class DecodeBatch:
    """Requests that decode together: row i of every cache belongs to `requests[i]`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.caches: LayerCaches = []

    def add(self, requests: list[Request], caches: list[LayerCaches]) -> None:
        """Append rows, in order."""
        if not requests:
            return
        merged = merge(caches)
        if self.requests:
            for batch, new in zip(self.caches, merged, strict=True):
                batch.extend(new)
        else:
            self.caches = merged
        self.requests += requests

    def extract(self, request: Request) -> LayerCaches:
        """A row as caches of one sequence. They may share arrays with the batch."""
        row = self.requests.index(request)
        return [cache.extract(row) for cache in self.caches]

    def remove(self, requests: set[Request]) -> None:
        """Drop the rows of `requests`; those that have none are ignored."""
        kept = [row for row, request in enumerate(self.requests) if request not in requests]
        if len(kept) == len(self.requests):
            return
        self.requests = [self.requests[row] for row in kept]
        if not kept:
            self.caches = []
            return
        rows = mx.array(kept)
        for cache in self.caches:
            cache.filter(rows)
