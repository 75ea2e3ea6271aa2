"""What only a CUDA device runs by itself, tried here on the CPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

import tiny_models
from vllm_metal.engine.mlx import linear
from vllm_metal.engine.mlx.fused import masked_attention


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(5, 1), (1, 7)])
def test_masked_attention_is_mlx_s_own(num_rows, num_tokens):
    shape = (num_rows, 2, 16, 8)
    queries = mx.random.normal((num_rows, 6, num_tokens, 8))
    keys, values = mx.random.normal(shape), mx.random.normal(shape)
    seen = mx.arange(1, 1 + num_rows * num_tokens)
    mask = mx.arange(16) < seen.reshape(num_rows, 1, num_tokens, 1)
    ours = masked_attention(queries, keys, values, scale=0.3, mask=mask)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert ours.shape == theirs.shape
    assert mx.allclose(ours, theirs, atol=1e-5)


def test_flattened_rows_are_projected_as_before():
    model = tiny_models.make("qwen3")
    rows, sequence = mx.array([[3], [1], [4]]), mx.array([[3, 1, 4]])
    before = model(rows), model(sequence)
    linear.flatten_rows(model)
    linear.flatten_rows(model)
    after = model(rows), model(sequence)
    assert all(mx.allclose(*pair, atol=1e-5) for pair in zip(before, after, strict=True))
    assert before[0].shape == after[0].shape
