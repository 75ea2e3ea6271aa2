from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import tiny_models
from vllm_metal.engine.mlx.self_check import Mode, choose_mode
from vllm_metal.errors import ModelError, NotAModel

PATH = Path("/models/tiny")


def choose(model: nn.Module, name: str = "llama") -> Mode:
    return choose_mode(model, tiny_models.CONFIGS[name], tiny_models.VOCAB_SIZE, path=PATH)


def spoil(model: nn.Module, name: str, number: float) -> None:
    array = mx.array(dict(tree_flatten(model.parameters()))[name])
    array[..., 3] = number
    model.update(tree_unflatten([(name, array)]))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("name", ["first", "last"])
def test_damaged_weights_are_named(kind: str, name: str) -> None:
    model = tiny_models.make(kind)
    names = [each for each, _ in tree_flatten(model.parameters())]
    spoilt = names[0] if name == "first" else names[-1]
    spoil(model, spoilt, math.nan)
    with pytest.raises(NotAModel, match=f"the weights of `{PATH}` are damaged: `{spoilt}`") as caught:
        choose(model, kind)
    assert "`metal pull`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("dtype", "hint"), [(mx.float16, "set `engine.dtype` to bfloat16"), (mx.float32, "may be damaged")]
)
def test_numbers_that_grow_too_large(dtype: mx.Dtype, hint: str) -> None:
    model = tiny_models.make("llama")
    # In float16 six of these are too much already.
    model.model.norm.weight *= 1e4 if dtype == mx.float16 else 1e38
    model.model.embed_tokens.weight *= 1e3
    model.set_dtype(dtype)
    with pytest.raises(ModelError, match=r"computes is not a number") as caught:
        choose(model)
    assert hint in (caught.value.hint or "")


def test_a_model_may_rule_tokens_out() -> None:
    model = tiny_models.make("llama")
    whole = type(model).__call__

    class Ruling(type(model)):
        def __call__(self, *args, **options):
            logits = whole(self, *args, **options)
            return mx.where(mx.arange(logits.shape[-1]) == 3, -math.inf, logits)

    model.__class__ = Ruling
    assert choose(model) in Mode
