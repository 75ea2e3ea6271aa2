"""Computes batches of whole inputs, padded on the right, piece by piece. Lives on the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vllm_metal.engine.embedding_core import Forward
from vllm_metal.engine.embedding_request import EmbeddingInput
from vllm_metal.engine.mlx import device, kv_cache
from vllm_metal.engine.mlx.bert import Bert
from vllm_metal.engine.mlx.pooling import Head

#: A narrower piece of a prompt takes as long.
_LEAST_COLUMNS = 16


class _HiddenStates(Protocol):
    """Of a batch that is being computed: [batch, tokens, size], None until the last piece is computed."""

    hidden: mx.array | None

    def advance(self, max_tokens: int) -> float:
        """As `Forward.advance`."""


class EncoderHiddenStates:
    """Some layers are a piece: each sees all of the text."""

    def __init__(self, model: Bert, token_ids: mx.array, type_ids: mx.array, lengths: mx.array) -> None:
        self.hidden: mx.array | None = None
        self._model = model
        self._num_layers = 0
        self._num_tokens = token_ids.size
        self._so_far = model.embed(token_ids, type_ids)
        self._mask = (mx.arange(token_ids.shape[1])[None] < lengths[:, None])[:, None, None]

    def advance(self, max_tokens: int) -> float:
        layers = self._model.layers
        num_layers = max(1, max_tokens * len(layers) // self._num_tokens)
        some = layers[self._num_layers : self._num_layers + num_layers]
        for layer in some:
            self._so_far = layer(self._so_far, self._mask)
        mx.eval(self._so_far)
        self._num_layers += len(some)
        if self._num_layers == len(layers):
            self.hidden = self._so_far
        return self._num_tokens * len(some) / len(layers)


class DecoderHiddenStates:
    """Some columns are a piece: a token sees those before it only, and so no padding."""

    def __init__(self, model: Any, token_ids: mx.array) -> None:
        self.hidden: mx.array | None = None
        self._model = model
        self._token_ids = token_ids
        self._caches = kv_cache.new_caches(model)
        self._chunks: list[mx.array] = []
        self._num_columns = 0

    def advance(self, max_tokens: int) -> float:
        num_rows, length = self._token_ids.shape
        num_columns = max(max_tokens // num_rows, _LEAST_COLUMNS)
        columns = self._token_ids[:, self._num_columns : self._num_columns + num_columns]
        chunk = self._model.model(columns, cache=self._caches)
        mx.eval(chunk, [cache.state for cache in self._caches])
        self._chunks.append(chunk)
        self._num_columns += columns.shape[1]
        if self._num_columns == length:
            self.hidden = mx.concatenate(self._chunks, axis=1)
        return float(columns.size)


class BatchForward:
    def __init__(
        self, states: _HiddenStates, head: Head, lengths: mx.array, dimensions: Sequence[int | None]
    ) -> None:
        self.vectors: list[bytes | None] | None = None
        self._states = states
        self._head = head
        self._lengths = lengths
        self._dimensions = dimensions

    def advance(self, max_tokens: int) -> float:
        num_tokens = self._states.advance(max_tokens)
        if self._states.hidden is not None:
            results = np.array(self._head(self._states.hidden, self._lengths))
            self.vectors = [
                self._part(result, wanted).tobytes() if np.isfinite(result).all() else None
                for result, wanted in zip(results, self._dimensions, strict=True)
            ]
        return num_tokens

    def _part(self, vector: NDArray[np.float32], wanted: int | None) -> NDArray[np.float32]:
        if wanted is None or wanted == len(vector):
            return vector
        part = vector[:wanted]
        return part / max(float(np.linalg.norm(part)), 1e-12) if self._head.normalizes else part


class PoolingRunner:
    """`model` is one of ours, whose layers see the whole text, or one of mlx-lm's."""

    def __init__(self, model: Any, head: Head) -> None:
        self._model = model
        self._head = head

    def begin(self, inputs: Sequence[EmbeddingInput], length: int) -> Forward:
        token_ids = np.zeros((len(inputs), length), np.int32)
        type_ids = np.zeros_like(token_ids)
        for row, each in enumerate(inputs):
            token_ids[row, : len(each.token_ids)] = each.token_ids
            if each.second_start is not None:
                type_ids[row, each.second_start :] = 1
        lengths = mx.array([len(each.token_ids) for each in inputs])
        states: _HiddenStates
        if isinstance(self._model, Bert):
            states = EncoderHiddenStates(self._model, mx.array(token_ids), mx.array(type_ids), lengths)
        else:
            states = DecoderHiddenStates(self._model, mx.array(token_ids))
        return BatchForward(states, self._head, lengths, [each.dimensions for each in inputs])

    def compute(self, inputs: Sequence[EmbeddingInput]) -> list[bytes | None]:
        """The vectors of `inputs`, in one go."""
        length = max(len(each.token_ids) for each in inputs)
        forward = self.begin(inputs, length)
        while forward.vectors is None:
            forward.advance(len(inputs) * length)
        return forward.vectors

    def rest(self) -> None:
        mx.clear_cache()

    def close(self) -> None:
        del self._model, self._head
        device.leave_thread()
