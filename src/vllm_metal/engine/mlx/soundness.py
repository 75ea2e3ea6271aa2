"""Why a model computes what is not a number, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from vllm_metal.engine.mlx import precision
from vllm_metal.errors import ModelError, NotAModel

_FETCH_ANEW = "`metal rm` deletes a damaged model, and `metal pull` then fetches it anew"


def not_a_number(path: Path, model: nn.Module) -> ModelError:
    """The error for the model at `path`; looks through all of its weights."""
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating) and mx.isnan(array).any():
            return NotAModel(
                f"the weights of `{path}` are damaged: `{name}` has what is not a number (NaN)",
                hint=_FETCH_ANEW,
            )
    what = f"what `{path}` computes is not a number (NaN)"
    if precision.compute_dtype(model) == "float16":
        return ModelError(
            what, hint="its numbers may be too large for float16: set `engine.dtype` to bfloat16 or float32"
        )
    return ModelError(what, hint=f"its weights may be damaged: {_FETCH_ANEW}")
