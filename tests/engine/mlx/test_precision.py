from __future__ import annotations

import logging
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
import pytest
from mlx.utils import tree_flatten

import tiny_models
from vllm_metal.engine.mlx import precision

pytestmark = pytest.mark.usefixtures("on_cpu")

PROMPT = mx.array([[5, 17, 3, 90, 41]])


def quantized(name: str, **options) -> nn.Module:
    model = tiny_models.make(name)
    nn.quantize(model, group_size=32, bits=4, **options)
    model.set_dtype(mx.bfloat16)
    return model


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def free_bytes(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_quantized_weights_become_dense_with_the_same_answer(name, caplog):
    """Layers, embeddings and stacks of experts."""
    model = quantized(name)
    model.set_dtype(mx.float32)
    expected = model(PROMPT)
    mx.eval(expected)
    with caplog.at_level(logging.INFO):
        precision.set_precision(model, None)
    assert not precision.is_quantized(model)
    assert dtypes(model) == {mx.float32}
    np.testing.assert_allclose(model(PROMPT), expected, rtol=1e-4, atol=1e-4)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_weights_that_do_not_fit_stay_quantized_with_a_warning(monkeypatch, caplog):
    model = quantized("llama")
    dense_bytes = tiny_models.make("llama").model.embed_tokens.weight.nbytes
    free_bytes(monkeypatch, dense_bytes)
    precision.set_precision(model, None)
    assert precision.is_quantized(model)
    assert precision.compute_dtype(model) == "bfloat16"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_half_of_the_free_memory_is_the_limit(monkeypatch):
    dense_bytes = sum(array.nbytes for _, array in tree_flatten(tiny_models.make("llama").parameters()))
    free_bytes(monkeypatch, 2 * dense_bytes - 1)
    model = quantized("llama")
    precision.set_precision(model, None)
    assert precision.is_quantized(model)
    free_bytes(monkeypatch, 2 * dense_bytes)
    precision.set_precision(model, None)
    assert not precision.is_quantized(model)


def test_half_precision_becomes_float32_unless_asked_for():
    model = tiny_models.make("llama")
    model.set_dtype(mx.bfloat16)
    precision.set_precision(model, mx.float16)
    assert dtypes(model) == {mx.float16}
    precision.set_precision(model, None)
    assert dtypes(model) == {mx.float32}


def test_float32_models_are_left_alone(caplog):
    model = tiny_models.make("llama")
    with caplog.at_level(logging.INFO):
        precision.set_precision(model, None)
    assert dtypes(model) == {mx.float32}
    assert caplog.records == []


def test_parameters_that_a_model_protects_keep_their_precision():
    model = tiny_models.make("deepseek_v3")
    protected = "e_score_correction_bias"
    precision.set_precision(model, mx.bfloat16)
    kept = {name: array.dtype for name, array in tree_flatten(model.parameters()) if protected in name}
    assert kept
    assert set(kept.values()) == {mx.float32}
    assert precision.compute_dtype(model) == "bfloat16"
