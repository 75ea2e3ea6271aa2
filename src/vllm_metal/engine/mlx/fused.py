"""A step as one forward of token rows.

Each token of the step is a batch row of its own: a model sees [tokens, 1]. Positions are per row, so every
projection and every rotary embedding is right as it stands. Only attention must know which rows belong
together, and that is here: `LayerKV` is the cache that a model's layer is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from vllm_metal.engine.mlx.slot_arrays import SlotArrays
from vllm_metal.engine.slot_kv_cache_manager import Slot


class Window(NamedTuple):
    """What a model gets as its mask, and hands on to attention."""

    size: int | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One token for each of the first `num_rows` rows of a pool: token rows from `offset` on.

    Keys up to `key_length` are looked at. Rows without a request compute something that nobody reads.
    """

    capacity: int
    num_rows: int
    offset: int
    key_length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of one request from position `start` on: token rows from `offset` on.

    Keys up to `key_length` are looked at, which may be past the chunk's end.
    """

    slot: Slot
    start: int
    num_tokens: int
    offset: int
    key_length: int


@dataclass(slots=True)
class StepPlan:
    """Which token row is what. `positions` [tokens] are in rows' order."""

    positions: mx.array
    groups: list[DecodeGroup]
    chunks: list[Chunk]
    _masks: dict[tuple[int, int | None], mx.array] = field(default_factory=dict)

    def group_mask(self, group: DecodeGroup, window: int | None) -> mx.array:
        """[rows, 1, 1, keys]: which keys each row sees."""
        key = (group.capacity, window)
        if key not in self._masks:
            position = self.positions[group.offset : group.offset + group.num_rows][:, None, None, None]
            keys = mx.arange(group.key_length)
            mask = keys <= position
            if window is not None:
                mask = mask & (keys > position - window)
            self._masks[key] = mask
        return self._masks[key]

    def chunk_mask(self, chunk: Chunk, window: int | None) -> mx.array | str:
        """[tokens, keys], or "causal" where no window cuts in."""
        end = chunk.start + chunk.num_tokens
        if chunk.key_length == end and (window is None or end <= window):
            return "causal"
        # The positions come from the device: a start that is baked in would make every chunk a new shape.
        position = self.positions[chunk.offset : chunk.offset + chunk.num_tokens][:, None]
        keys = mx.arange(chunk.key_length)
        mask = keys <= position
        return mask if window is None else mask & (keys > position - window)


class LayerKV:
    """One layer's keys and values for one step, in the shape of mlx-lm's caches."""

    def __init__(self, plan: StepPlan, arrays: SlotArrays, layer: int) -> None:
        self._plan = plan
        self._keys = arrays.keys[layer]
        self._values = arrays.values[layer]
        self._window = arrays.layers[layer].window

    @property
    def offset(self) -> mx.array:
        return self._plan.positions

    def make_mask(
        self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> Window:
        return Window(window_size or self._window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's keys and values [tokens, kv_heads, 1, head_dim] to their slots."""
        for pools, new in ((self._keys, keys), (self._values, values)):
            # Decodes first: a row whose request is being prefilled writes where its next chunk will.
            for group in self._plan.groups:
                _write_group(pools, group, new, self._plan.positions)
            for chunk in self._plan.chunks:
                _write_chunk(pools[chunk.slot.capacity], chunk, new)
        return keys, values

    def attend(self, queries: mx.array, *, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """[tokens, heads, 1, value_dim] for `queries` [tokens, heads, 1, head_dim]."""
        if not isinstance(mask, Window):
            raise TypeError("this model makes attention masks of its own")
        outputs = []
        for group in self._plan.groups:
            outputs.append(
                attention(
                    queries[group.offset : group.offset + group.num_rows],
                    self._keys[group.capacity][: group.num_rows, :, : group.key_length],
                    self._values[group.capacity][: group.num_rows, :, : group.key_length],
                    scale=scale,
                    mask=self._plan.group_mask(group, mask.size),
                    sinks=sinks,
                )
            )
        for chunk in self._plan.chunks:
            row = chunk.slot.row
            output = attention(
                mx.contiguous(_as_sequence(queries, chunk)),
                self._keys[chunk.slot.capacity][row : row + 1, :, : chunk.key_length],
                self._values[chunk.slot.capacity][row : row + 1, :, : chunk.key_length],
                scale=scale,
                mask=self._plan.chunk_mask(chunk, mask.size),
                sinks=sinks,
            )
            outputs.append(output.transpose(2, 1, 0, 3))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str,
    sinks: mx.array | None,
) -> mx.array:
    """Each row's queries [rows, heads, tokens, dim] against its own keys [rows, kv_heads, keys, dim]."""
    if isinstance(mask, str) or sinks is not None or not mx.cuda.is_available():
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    return masked_attention(queries, keys, values, scale=scale, mask=mask)


def masked_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array
) -> mx.array:
    """The same in three steps: on CUDA, MLX's fused attention is several times slower when it has a mask."""
    num_rows, num_heads, num_tokens, key_dim = queries.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    grouped = (queries * scale).reshape(num_rows, num_kv_heads, -1, key_dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(num_rows, num_heads, num_tokens, num_keys)
    scores = mx.softmax(mx.where(mask, scores, mx.finfo(scores.dtype).min), axis=-1, precise=True)
    output = scores.reshape(num_rows, num_kv_heads, -1, num_keys) @ values
    return output.reshape(num_rows, num_heads, num_tokens, values.shape[-1])


def _write_group(pools: dict[int, mx.array], group: DecodeGroup, new: mx.array, positions: mx.array) -> None:
    pool = pools.pop(group.capacity)
    rows = slice(group.offset, group.offset + group.num_rows)
    if group.num_rows == pool.shape[0]:
        index = mx.broadcast_to(positions[rows][:, None, None, None], new[rows].shape)
        pool = mx.put_along_axis(pool, index, new[rows], axis=2)
    else:
        pool[mx.arange(group.num_rows), :, positions[rows]] = new[rows].squeeze(2)
    pools[group.capacity] = pool


def _write_chunk(pool: mx.array, chunk: Chunk, new: mx.array) -> None:
    row, end = chunk.slot.row, chunk.start + chunk.num_tokens
    pool[row : row + 1, :, chunk.start : end] = _as_sequence(new, chunk)


def _as_sequence(rows: mx.array, chunk: Chunk) -> mx.array:
    """[1, heads, tokens, dim] of a chunk's token rows [tokens, heads, 1, dim]."""
    return rows[chunk.offset : chunk.offset + chunk.num_tokens].transpose(2, 1, 0, 3)
