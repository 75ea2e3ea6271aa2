"""The arrays behind the slots: keys and values [slots, kv_heads, capacity, head_dim], a pool, a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from vllm_metal.engine.slot_kv_cache_manager import Change, Drop, Move, Resize, Restore, Store


@dataclass(frozen=True, slots=True)
class LayerShape:
    """`window` is None where a token attends to all before it."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None


class SlotArrays:
    """`keys[layer][capacity]` and `values[layer][capacity]`.

    Written in place, which MLX does only where nothing else holds the array: so nothing may keep a slice.
    """

    def __init__(self, layers: list[LayerShape]) -> None:
        self.layers = layers
        self.keys: list[dict[int, mx.array]] = [{} for _ in layers]
        self.values: list[dict[int, mx.array]] = [{} for _ in layers]
        self._segments: dict[int, list[mx.array]] = {}

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Resize(capacity, num_slots):
                    self._resize(capacity, num_slots)
                case Store(segment_id, slot, start, num_tokens):
                    self._segments[segment_id] = [
                        _copy(pools[slot.capacity], slot.row, start, num_tokens) for pools in self._pools
                    ]
                    # Left lazy they would hold this version of the pools, and every later write copy it.
                    mx.async_eval(self._segments[segment_id])
                case Restore(segment_id, offset, slot, start, num_tokens):
                    for pools, segment in zip(self._pools, self._segments[segment_id], strict=True):
                        rows = slice(slot.row, slot.row + 1)
                        kept = segment[:, offset : offset + num_tokens]
                        pools[slot.capacity][rows, :, start : start + num_tokens] = kept[None]
                case Drop(segment_id):
                    del self._segments[segment_id]
                case Move(source, target):
                    for pools in self._pools:
                        # `take` copies; a slice would share the memory, and the write then copy the pool.
                        row = mx.take(pools[source.capacity], mx.array([source.row]), axis=0)
                        length = min(source.capacity, target.capacity)
                        pools[target.capacity][target.row : target.row + 1, :, :length] = row[:, :, :length]

    def _resize(self, capacity: int, num_slots: int) -> None:
        for shape, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            for pools, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                if num_slots == 0:
                    del pools[capacity]
                    continue
                old = pools.get(capacity)
                new = mx.zeros((num_slots, shape.num_kv_heads, capacity, dim), shape.dtype)
                if old is not None:
                    kept = min(num_slots, old.shape[0])
                    new[:kept] = old[:kept]
                pools[capacity] = new

    def take(self, capacities: Sequence[int]) -> list[mx.array]:
        """Remove the arrays of these pools and return them, so that nothing else holds them."""
        return [pools.pop(capacity) for capacity in capacities for pools in self._pools]

    def put(self, capacities: Sequence[int], arrays: Sequence[mx.array]) -> None:
        """The reverse of `take`."""
        places = [(pools, capacity) for capacity in capacities for pools in self._pools]
        for (pools, capacity), array in zip(places, arrays, strict=True):
            pools[capacity] = array

    @property
    def arrays(self) -> list[mx.array]:
        """All that may have changed in a step."""
        return [array for pools in self._pools for array in pools.values()]

    @property
    def _pools(self) -> list[dict[int, mx.array]]:
        return [*self.keys, *self.values]


def _copy(pool: mx.array, row: int, start: int, num_tokens: int) -> mx.array:
    """[kv_heads, tokens, dim] of a row. A slice would hold the pool, and the next write copy all of it."""
    # Adding nothing is the cheapest operation that always makes a new array; gathering costs five times that.
    return pool[row, :, start : start + num_tokens] + 0
