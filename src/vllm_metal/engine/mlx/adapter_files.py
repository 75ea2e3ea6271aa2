"""Reads a LoRA adapter from a folder, as mlx-lm or PEFT wrote it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vllm_metal.engine.mlx import peft_names, safetensors
from vllm_metal.errors import NotAModel, UnsupportedModel
from vllm_metal.hub import store

_MLX_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[ab])")
_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
#: Ways to begin a training that change the base weights, too.
_CHANGES_BASE = ("pissa", "olora", "corda")
_ADAPTABLE = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
_OTHER_BASE = "it was made for another base model, or for another program's form of it"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a linear layer: x @ a @ b, where a is [inputs, rank], b [rank, outputs].

    For a layer of experts both have one more axis, which comes first.
    """

    a: mx.array
    b: mx.array

    @property
    def rank(self) -> int:
        return self.a.shape[-1]


def read(folder: Path, model: nn.Module, dtype: mx.Dtype) -> dict[str, LowRank]:
    """What the adapter in `folder` adds, in `dtype`, by the path of the layer of `model`.

    Raises NotAModel where files are missing or damaged, UnsupportedModel for an adapter that does not fit.
    """
    if not (folder / "adapter_config.json").is_file():
        raise NotAModel(
            f"`{folder}` holds no adapter: `adapter_config.json` is missing",
            hint="name the folder that mlx-lm or PEFT wrote",
        )
    config = store.read_json(folder / "adapter_config.json")
    read_format = _read_peft if "peft_type" in config else _read_mlx
    try:
        adapter = read_format(folder, config, model)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, re.error) as exc:
        raise NotAModel(f"`{folder / 'adapter_config.json'}` is damaged: {exc!r}") from exc
    if not adapter:
        raise NotAModel(f"the adapter `{folder}` adapts nothing")
    modules = dict(model.named_modules())
    for path, matrices in adapter.items():
        _check(folder, path, modules.get(path), matrices)
        adapter[path] = LowRank(matrices.a.astype(dtype), matrices.b.astype(dtype))
        _require_finite(folder, path, adapter[path])
    return adapter


def _read_mlx(folder: Path, config: dict[str, Any], model: nn.Module) -> dict[str, LowRank]:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise _unsupported(folder, f"is of the type `{kind}`", "train it again with `--fine-tune-type lora`")
    scale = float(config["lora_parameters"]["scale"])
    adapter = {}
    for path, (a, b) in _pairs(folder, "adapters.safetensors", _MLX_NAME).items():
        if a.ndim == 3:  # Of experts, whose matrices lie the other way round.
            a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        adapter[path] = LowRank(a, scale * b.astype(mx.float32))
    return adapter


def _read_peft(folder: Path, config: dict[str, Any], model: nn.Module) -> dict[str, LowRank]:
    if config["peft_type"] != "LORA":
        raise _unsupported(folder, f"is of PEFT's type `{config['peft_type']}`")
    if config.get("use_dora"):
        raise _unsupported(folder, "is of the type `dora`", "train it again without `use_dora`")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise _unsupported(
            folder, f"began from `{start}`, which changes the base weights", "have PEFT convert it to LoRA"
        )
    pairs = _pairs(folder, "adapter_model.safetensors", _PEFT_NAME)
    paths = peft_names.paths_in(model, {name: (b.shape[0], a.shape[1]) for name, (a, b) in pairs.items()})
    adapter = {}
    for name, (a, b) in pairs.items():
        if (path := paths[name]) is None:
            raise _unsupported(folder, f"adapts `{name}`, whose weights mlx-lm changes when it loads them")
        b = _peft_scale(config, name, rank=a.shape[0]) * b.astype(mx.float32)
        adapter[path] = LowRank(a.T, b.T)
    return adapter


def _peft_scale(config: dict[str, Any], name: str, *, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, of_layers in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            alpha = of_layers
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs(folder: Path, file_name: str, pattern: re.Pattern[str]) -> dict[str, tuple[mx.array, mx.array]]:
    """By the layer's name its two matrices as they lie in the file."""
    path = folder / file_name
    if not path.is_file():
        is_pickled = (folder / "adapter_model.bin").is_file()
        raise NotAModel(
            f"`{folder}` lacks `{file_name}`",
            hint="save the adapter again, as safetensors" if is_pickled else "copy the whole folder again",
        )
    safetensors.check_file(path)
    matrices: dict[str, dict[str, mx.array]] = defaultdict(dict)
    try:
        arrays: Any = mx.load(str(path))
    except RuntimeError as exc:
        raise NotAModel(f"`{path}` cannot be read: {exc}") from exc
    for key, array in arrays.items():
        match = pattern.fullmatch(key)
        # What MLX has no floating type for, as 8 bits, it reads as integers.
        is_matrix = array.ndim in (2, 3) and array.size > 0 and mx.issubdtype(array.dtype, mx.floating)
        if match is None or not is_matrix:
            raise _unsupported(folder, f"holds `{key}`, which is not LoRA of a linear layer")
        matrices[match["layer"]][match["matrix"].lower()] = array
    for layer, of_layer in matrices.items():
        if len(of_layer) != 2:
            raise NotAModel(f"`{path}` holds only one of the two matrices of `{layer}`")
    return {layer: (of_layer["a"], of_layer["b"]) for layer, of_layer in matrices.items()}


def _check(folder: Path, path: str, layer: nn.Module | None, matrices: LowRank) -> None:
    if layer is None:
        raise _unsupported(folder, f"adapts `{path}`, which this model does not have", _OTHER_BASE)
    if path.rpartition(".")[2] == "lm_head" or not isinstance(layer, _ADAPTABLE):
        raise _unsupported(
            folder,
            f"adapts `{path}`; only linear layers can be adapted, and not the vocabulary's",
            "train it again without that layer",
        )
    *experts, num_outputs, num_inputs = layer.weight.shape
    if "scales" in layer:
        num_inputs = num_inputs * 32 // layer.bits
    fitting = (*experts, num_inputs, matrices.rank), (*experts, matrices.rank, num_outputs)
    if (matrices.a.shape, matrices.b.shape) != fitting:
        raise _unsupported(
            folder,
            f"has matrices of {matrices.a.shape} and {matrices.b.shape} for `{path}`, "
            f"which has {num_inputs} inputs and {num_outputs} outputs{' of each expert' if experts else ''}",
            _OTHER_BASE,
        )


def _require_finite(folder: Path, path: str, matrices: LowRank) -> None:
    """Zero times anything else is no number, so one adapter's would spoil the rows of all the others."""
    if not (mx.isfinite(matrices.a).all() & mx.isfinite(matrices.b).all()):
        dtype = str(matrices.a.dtype).removeprefix("mlx.core.")
        raise _unsupported(
            folder,
            f"has numbers for `{path}` that are not finite in {dtype}",
            "its training may have diverged; train it again",
        )


def _unsupported(folder: Path, what: str, hint: str | None = None) -> UnsupportedModel:
    return UnsupportedModel(f"the adapter `{folder}` {what}", hint=hint)
