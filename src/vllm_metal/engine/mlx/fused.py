"""A step as one forward of token rows.

Each token of the step is a batch row of its own: a model sees [tokens, 1]. Positions are per row, so every
projection and every rotary embedding is right as it stands. Only attention must know which rows belong
together, and that is here: `LayerKV` is the cache that a model's layer is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from vllm_metal.engine.mlx.slot_arrays import SlotArrays


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
class Opening:
    """`num_rows` token rows from `offset` on: chunks that begin their requests, one behind the other.

    All the keys that they look at are the step's own. `is_packed` unless they are of one request.
    """

    capacity: int
    num_rows: int
    offset: int
    is_packed: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_rows` token rows from `offset` on, of one request whose beginning has its KV.

    Keys up to `key_length` are looked at; `is_exact` if they end with the chunk's own.
    """

    capacity: int
    num_rows: int
    offset: int
    key_length: int
    is_exact: bool


#: Rows that attend in one call.
Part: TypeAlias = DecodeGroup | Opening | Chunk


class StepShape(NamedTuple):
    """What a step's graph depends on: two steps of one shape differ in nothing but what arrays hold."""

    groups: tuple[DecodeGroup, ...]
    openings: tuple[Opening, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    has_adapters: bool = False

    @property
    def parts(self) -> list[Part]:
        """In rows' order."""
        return [*self.groups, *self.openings, *self.chunks]

    @property
    def capacities(self) -> list[int]:
        """Of the pools that it writes to."""
        return sorted({part.capacity for part in self.parts})


@dataclass(slots=True)
class StepPlan:
    """Of each token row [tokens]: its position, its slot in its pool, the row that begins its chunk, and its
    adapter, unless no row has one.
    """

    shape: StepShape
    positions: mx.array
    slots: mx.array
    starts: mx.array
    adapters: mx.array | None = None
    _masks: dict[tuple[Part, int | None], mx.array] = field(default_factory=dict)

    def mask(self, part: Part, window: int | None) -> mx.array | str:
        """The keys that a row sees: [rows, 1, 1, keys] of a group, else [rows, keys], or "causal"."""
        match part:
            case Opening(num_rows=num_keys, is_packed=False) | Chunk(key_length=num_keys, is_exact=True):
                if window is None or num_keys <= window:
                    return "causal"
        if (part, window) not in self._masks:
            self._masks[part, window] = self._make_mask(part, window)
        return self._masks[part, window]

    def _make_mask(self, part: Part, window: int | None) -> mx.array:
        rows = slice(part.offset, part.offset + part.num_rows)
        if isinstance(part, Opening):
            # Keys and queries are the same rows, and those of one chunk are as far apart as their positions.
            query = mx.arange(part.num_rows)[:, None]
            keys = mx.arange(part.num_rows)
            mask = (keys <= query) & (keys >= self.starts[rows][:, None] - part.offset)
        else:
            query = self.positions[rows][:, None]
            keys = mx.arange(part.key_length)
            mask = keys <= query
        if window is not None:
            mask = mask & (keys > query - window)
        return mask[:, None, None] if isinstance(part, DecodeGroup) else mask


class LayerKV:
    """One layer's keys and values for one step, in the shape of mlx-lm's caches."""

    def __init__(self, plan: StepPlan, arrays: SlotArrays, layer: int) -> None:
        self._plan = plan
        self._keys = arrays.keys[layer]
        self._values = arrays.values[layer]
        self._window = arrays.layers[layer].window
        self._new: tuple[mx.array, mx.array]

    @property
    def offset(self) -> mx.array:
        return self._plan.positions

    def make_mask(
        self, num_tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> Window:
        return Window(window_size or self._window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's keys and values [tokens, kv_heads, 1, head_dim] to their slots."""
        self._new = keys, values
        for pools, new in ((self._keys, keys), (self._values, values)):
            # Decodes first: a row whose request is being prefilled writes where its next chunk will.
            for part in self._plan.shape.parts:
                pools[part.capacity] = _written(pools.pop(part.capacity), part, new, self._plan)
        return keys, values

    def attend(self, queries: mx.array, *, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """[tokens, heads, 1, value_dim] for `queries` [tokens, heads, 1, head_dim]."""
        if not isinstance(mask, Window):
            raise TypeError("this model makes attention masks of its own")
        outputs = []
        for part in self._plan.shape.parts:
            own = queries[part.offset : part.offset + part.num_rows]
            is_sequence = not isinstance(part, DecodeGroup)
            output = attention(
                mx.contiguous(_transposed(own)) if is_sequence else own,
                *self._keys_and_values(part),
                scale=scale,
                mask=self._plan.mask(part, mask.size),
                sinks=sinks,
            )
            outputs.append(_transposed(output) if is_sequence else output)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _keys_and_values(self, part: Part) -> list[mx.array]:
        """What its rows look at: [rows, kv_heads, keys, dim] of a group, else [1, kv_heads, keys, dim]."""
        match part:
            case DecodeGroup(capacity, num_rows, _, key_length):
                return [pools[capacity][:num_rows, :, :key_length] for pools in (self._keys, self._values)]
            case Opening(_, num_rows, offset):
                return [_transposed(new[offset : offset + num_rows]) for new in self._new]
            case Chunk(capacity, _, offset, key_length):
                # Only the device knows the slot: one that is baked in would be a shape of its own.
                slot = self._plan.slots[offset : offset + 1]
                return [
                    mx.take(pools[capacity][:, :, :key_length], slot, axis=0)
                    for pools in (self._keys, self._values)
                ]


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


def _written(pool: mx.array, part: Part, new: mx.array, plan: StepPlan) -> mx.array:
    """`pool` with the rows of `part` in their slots."""
    rows = slice(part.offset, part.offset + part.num_rows)
    positions = plan.positions[rows]
    if isinstance(part, DecodeGroup) and part.num_rows == pool.shape[0]:
        # Several times faster than a scatter.
        index = mx.broadcast_to(positions[:, None, None, None], new[rows].shape)
        return mx.put_along_axis(pool, index, new[rows], axis=2)
    pool[plan.slots[rows], :, positions] = new[rows].squeeze(2)
    return pool


def _transposed(rows: mx.array) -> mx.array:
    """[1, heads, tokens, dim] of token rows [tokens, heads, 1, dim], and the reverse."""
    return rows.transpose(2, 1, 0, 3)
