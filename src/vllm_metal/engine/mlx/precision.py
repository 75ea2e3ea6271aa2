"""The number format of a loaded model: what it computes in, and the CPU's dense float32 form."""

from __future__ import annotations

import logging
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

logger = logging.getLogger(__name__)

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
_HALF = (mx.float16, mx.bfloat16)


def set_precision(model: nn.Module, dtype: mx.Dtype | None, *, default: mx.Dtype | None = None) -> None:
    """Evaluate the model's weights in `dtype`; None means `default`, or else as they are stored.

    On the CPU backend quantized weights become dense, and half precision becomes float32 unless a dtype is
    given, where that fits in half of the free memory: quantized and half-precision kernels are slow there.
    """
    target = dtype or default
    if mx.default_device() == mx.cpu and (is_quantized(model) or (dtype is None and _dtype(model) in _HALF)):
        dense_dtype = dtype or mx.float32
        needed, free = _dense_bytes(model, dense_dtype), psutil.virtual_memory().available
        if needed <= free // 2:
            logger.info("CPU backend: expanding the weights to %s, %s", dtype_name(dense_dtype), _gib(needed))
            _expand(model, dense_dtype)
            target = dense_dtype
        else:
            logger.warning(
                "CPU backend: the weights stay as stored, which is slow: %s needs %s, half of the free %s",
                dtype_name(dense_dtype),
                _gib(needed),
                _gib(free),
            )
    if target is not None:
        _cast(model, target)
    mx.eval(model.parameters())


def is_quantized(model: nn.Module) -> bool:
    return any(_is_expandable(module) for module in model.modules())


def compute_dtype(model: nn.Module) -> str:
    """Name of the dtype that the model computes in."""
    return dtype_name(_dtype(model))


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _dtype(model: nn.Module) -> mx.Dtype:
    """The commonest floating dtype; the scales of quantized layers count, since activations take theirs."""
    floating = (
        array.dtype
        for _, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    )
    dtype: mx.Dtype = Counter(floating).most_common(1)[0][0]
    return dtype


def _dense_bytes(model: nn.Module, dtype: mx.Dtype) -> int:
    total = 0
    for _, module in _leaves(model):
        if _is_expandable(module):
            total += module.scales.size * module.group_size * dtype.size
        else:
            total += sum(array.size * dtype.size for _, array in tree_flatten(module.parameters()))
    return total


def _expand(model: nn.Module, dtype: mx.Dtype) -> None:
    # Popped one by one, so that at most one layer exists in both forms.
    leaves = _leaves(model)
    while leaves:
        path, module = leaves.pop()
        if _is_expandable(module):
            dense = _dense(module, dtype)
            mx.eval(dense.parameters())
            model.update_modules(tree_unflatten([(path, dense.eval())]))


def _dense(module: nn.Module, dtype: mx.Dtype) -> nn.Module:
    scales, biases = module.scales, module.get("biases")
    if biases is not None:
        # In half precision the CPU's kernel is three times slower, and rounds.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(
        module.weight, scales, biases, group_size=module.group_size, bits=module.bits, mode=module.mode
    ).astype(dtype)
    dense: nn.Module
    if isinstance(module, nn.QuantizedEmbedding):
        dense = nn.Embedding(*weight.shape)
    elif isinstance(module, nn.QuantizedLinear):
        dense = nn.Linear(*reversed(weight.shape), bias="bias" in module)
    else:
        num_experts, output_dims, input_dims = weight.shape
        dense = SwitchLinear(input_dims, output_dims, num_experts, bias="bias" in module)
    dense.weight = weight
    if "bias" in module:
        dense.bias = module.bias
    return dense


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    # Some models name parameters that must keep their precision.
    may_cast = getattr(model, "cast_predicate", lambda path: True)
    parameters = tree_flatten(model.parameters())
    while parameters:
        path, array = parameters.pop()
        if array.dtype != dtype and mx.issubdtype(array.dtype, mx.floating) and may_cast(path):
            array = array.astype(dtype)
            mx.eval(array)
            model.update(tree_unflatten([(path, array)]))


def _is_expandable(module: nn.Module) -> bool:
    # A global scale is one an expert, which `dequantize` does not take.
    return isinstance(module, _QUANTIZED) and getattr(module, "global_scale", None) is None


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    leaves: list[tuple[str, nn.Module]] = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return leaves


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
