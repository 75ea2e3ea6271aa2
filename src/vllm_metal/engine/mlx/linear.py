"""On CUDA: projections of token rows as one matrix product.

There MLX computes [rows, 1, dim] times a matrix as a product a row, for a chunk of a prompt three times
slower than [1, rows, dim]; on Metal it folds the rows by itself.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.mlx.override import override


def flatten_rows(model: Any) -> None:
    """Have every linear layer of `model` take its rows as one sequence. Doing it twice is harmless."""
    for _, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.QuantizedLinear)) and not hasattr(module, "flattens_rows"):
            override(module, "__call__", _flattened(type(module)))
            module.flattens_rows = True


def _flattened(own: Any) -> Any:
    def call(self: Any, rows: mx.array) -> mx.array:
        if rows.ndim != 3 or rows.shape[1] != 1:
            return own.__call__(self, rows)  # type: ignore[no-any-return]
        output: mx.array = own.__call__(self, rows.swapaxes(0, 1))
        return output.swapaxes(0, 1)

    return call
