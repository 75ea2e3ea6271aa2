"""From the hidden states of a batch to one vector or score for each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

Activation = Callable[[mx.array], mx.array]
#: One vector an input [batch, size], of hidden states [batch, tokens, size] and lengths [batch].
Pool = Callable[[mx.array, mx.array], mx.array]


class Head(Protocol):
    """Hidden states [batch, tokens, size], which are padded on the right, and lengths [batch] to results
    [batch, dimensions] in float32. With `normalizes`, a part of a result is to be normalized again.
    """

    normalizes: bool

    def __call__(self, hidden: mx.array, lengths: mx.array) -> mx.array: ...


def first(hidden: mx.array, lengths: mx.array) -> mx.array:
    return hidden[:, 0]


def last(hidden: mx.array, lengths: mx.array) -> mx.array:
    return mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]


def mean(hidden: mx.array, lengths: mx.array) -> mx.array:
    return _sum(hidden, lengths) / lengths[:, None]


def mean_by_root(hidden: mx.array, lengths: mx.array) -> mx.array:
    return _sum(hidden, lengths) / mx.sqrt(lengths.astype(mx.float32))[:, None]


def greatest(hidden: mx.array, lengths: mx.array) -> mx.array:
    return mx.where(_is_text(hidden, lengths), hidden, -mx.inf).max(axis=1)


def _sum(hidden: mx.array, lengths: mx.array) -> mx.array:
    return mx.where(_is_text(hidden, lengths), hidden.astype(mx.float32), 0).sum(axis=1)


def _is_text(hidden: mx.array, lengths: mx.array) -> mx.array:
    return (mx.arange(hidden.shape[1])[None] < lengths[:, None])[:, :, None]


def normalize(vectors: mx.array) -> mx.array:
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


class VectorHead(nn.Module):
    """Pooling, in several ways side by side if need be, and what a folder has behind it."""

    def __init__(
        self, pools: Sequence[Pool], dense: Sequence[tuple[nn.Linear, Activation]], normalizes: bool
    ):
        super().__init__()
        self.pools = list(pools)
        self.dense = [layer for layer, _ in dense]
        self.activations = [activation for _, activation in dense]
        self.normalizes = normalizes

    def __call__(self, hidden: mx.array, lengths: mx.array) -> mx.array:
        pooled = mx.concatenate([pool(hidden, lengths).astype(mx.float32) for pool in self.pools], axis=-1)
        for layer, activation in zip(self.dense, self.activations, strict=True):
            pooled = activation(layer(pooled)).astype(mx.float32)
        return normalize(pooled) if self.normalizes else pooled


class ClassifierHead(nn.Module):
    """Two layers over one token, as encoders that compare have them; a decoder's has the second alone."""

    normalizes = False

    def __init__(
        self, pool: Pool, dense: nn.Linear | None, activation: Activation, out: nn.Linear, final: Activation
    ) -> None:
        super().__init__()
        self.pool = pool
        self.dense = dense
        self.activation = activation
        self.out = out
        self.final = final

    def __call__(self, hidden: mx.array, lengths: mx.array) -> mx.array:
        pooled = self.pool(hidden, lengths)
        if self.dense is not None:
            pooled = self.activation(self.dense(pooled))
        return self.final(self.out(pooled).astype(mx.float32))
