"""Computes the vocabulary projection for chosen rows only.

Models differ in what they do after the projection (scaling, soft caps), so it is the projecting module that
selects, and the model is called as it is. A model that projects in yet another way computes all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.mlx.override import override


class Selection:
    """The rows to project: all, unless `only` says which. `applied` tells whether the model did so."""

    def __init__(self) -> None:
        self.applied = False
        self._rows: mx.array | None = None

    @contextmanager
    def only(self, rows: mx.array) -> Iterator[None]:
        """Project the rows of an index array [rows] meanwhile."""
        self._rows = rows
        self.applied = False
        try:
            yield
        finally:
            self._rows = None

    def of(self, hidden: mx.array) -> mx.array:
        if self._rows is None:
            return hidden
        self.applied = True
        return hidden[self._rows]


def select_rows(model: Any) -> Selection:
    """Have the head of `model`, wherever it is, project what the result says.

    The next call for the same model gives the same selection.
    """
    modules = model.named_modules()
    for _, module in modules:
        if selection := getattr(module, "row_selection", None):
            return selection  # type: ignore[no-any-return]
    selection = Selection()
    for path, module in modules:
        if path.rpartition(".")[2] == "lm_head":
            _patch(module, "__call__", selection)
        elif isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            _patch(module, "as_linear", selection)
    return selection


def _patch(module: Any, method: str, selection: Selection) -> None:
    own = type(module)

    def projected(self: Any, hidden: mx.array) -> mx.array:
        result: mx.array = getattr(own, method)(self, selection.of(hidden))
        return result

    override(module, method, projected)
    module.row_selection = selection
