"""Puts LoRA adapters beside the weights of a model's layers, for any batch row to use any of them.

The matrices of all adapters of a layer lie side by side, so that it takes two more products, however many
adapters and rows there are; what lies between the two is zeroed where it is not of the row's own adapter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from vllm_metal.engine.mlx import adapter_files, adapters
from vllm_metal.engine.mlx.adapter_files import LowRank
from vllm_metal.engine.mlx.adapters import Adapters, Ranks
from vllm_metal.engine.mlx.override import override


def install(model: Any, folders: Sequence[Path], dtype: mx.Dtype) -> None:
    """Load the adapters of `folders`, counted in this order; they compute in `dtype`.

    Raises NotAModel where files are missing or damaged, UnsupportedModel for an adapter that does not fit.
    """
    own = adapters.of(model)
    own.num_adapters = len(folders)
    by_layer: dict[str, dict[int, LowRank]] = defaultdict(dict)
    for adapter, folder in enumerate(folders, 1):
        for path, matrices in adapter_files.read(folder, model, dtype).items():
            by_layer[path][adapter] = matrices
    modules = dict(model.named_modules())
    for path, of_layer in by_layer.items():
        beside = LowRank(
            mx.concatenate([matrices.a for matrices in of_layer.values()], axis=-1),
            mx.concatenate([matrices.b for matrices in of_layer.values()], axis=-2),
        )
        mx.eval(beside.a, beside.b)
        own.num_bytes += beside.a.nbytes + beside.b.nbytes
        ranks = tuple((adapter, matrices.rank) for adapter, matrices in of_layer.items())
        # Arrays in the function of a class would outlive the model.
        modules[path].beside = beside
        adapt = _adapt_linear if beside.a.ndim == 2 else _adapt_experts
        adapt(modules[path], own, ranks)
    for module in modules.values():
        if isinstance(module, (SwitchGLU, SwitchMLP)):
            _tell_order(module, own)


def _adapt_linear(layer: Any, own: Adapters, ranks: Ranks) -> None:
    plain = type(layer)

    def call(self: Any, inputs: mx.array) -> mx.array:
        outputs: mx.array = plain.__call__(self, inputs)
        if not own.are_used:
            return outputs
        beside: LowRank = self.beside
        columns = own.only_own(inputs @ beside.a, ranks)
        return outputs + (columns @ beside.b).astype(outputs.dtype)

    override(layer, "__call__", call)


def _adapt_experts(layer: Any, own: Adapters, ranks: Ranks) -> None:
    plain = type(layer)

    def call(self: Any, inputs: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        outputs: mx.array = plain.__call__(self, inputs, indices, sorted_indices=sorted_indices)
        if not own.are_used:
            return outputs
        experts: Any = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        beside: LowRank = self.beside
        columns = mx.gather_mm(inputs, beside.a, **experts)
        columns = own.only_own(columns, ranks, are_sorted=sorted_indices)
        return outputs + mx.gather_mm(columns, beside.b, **experts).astype(outputs.dtype)

    override(layer, "__call__", call)


def _tell_order(module: Any, own: Adapters) -> None:
    """Have a module that may sort what it hands to its experts tell in which order."""
    plain = type(module)

    def call(self: Any, inputs: mx.array, indices: mx.array) -> mx.array:
        # As the module itself sorts; where it does not, this is never computed.
        order = mx.argsort(indices.flatten()) if own.are_used else None
        with own.sorted_by(order):
            outputs: mx.array = plain.__call__(self, inputs, indices)
        return outputs

    override(module, "__call__", call)
