"""Writes random LoRA adapters for tiny models, in the formats of mlx-lm and of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

#: Strong enough to change what a tiny model says.
SCALE = 4.0


def matrices(
    model: nn.Module, *, seed: int, rank: int = 4, only: tuple[str, ...] = ("q_proj", "o_proj", "up_proj")
) -> dict[str, tuple[mx.array, mx.array]]:
    """By the path of each linear layer whose last name is of `only`: [inputs, rank] and [rank, outputs].

    Of a layer of experts, as mlx-lm keeps them: [experts, rank, inputs] and [experts, outputs, rank].
    """
    mx.random.seed(seed)
    found = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in only and "weight" in module:
            *experts, num_outputs, num_inputs = module.weight.shape
            if "scales" in module:
                num_inputs = num_inputs * 32 // module.bits
            a = mx.random.normal((*experts, num_inputs, rank)) / num_inputs**0.5
            b = mx.random.normal((*experts, rank, num_outputs)) / rank**0.5
            found[path] = (a.swapaxes(1, 2), b.swapaxes(1, 2)) if experts else (a, b)
    return found


def write_mlx(folder: Path, layers: dict[str, tuple[mx.array, mx.array]], **config: Any) -> Path:
    folder.mkdir()
    rank = next(iter(layers.values()))[0].shape[1]
    keys = sorted({path.partition("layers.")[2].partition(".")[2] for path in layers})
    parameters = {"rank": rank, "scale": SCALE, "dropout": 0.0, "keys": keys}
    written = {"fine_tune_type": "lora", "num_layers": 64, "lora_parameters": parameters} | config
    (folder / "adapter_config.json").write_text(json.dumps(written))
    tensors = {}
    for path, (a, b) in layers.items():
        tensors |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    return folder


def write_peft(folder: Path, layers: dict[str, tuple[mx.array, mx.array]], **config: Any) -> Path:
    folder.mkdir()
    rank = next(iter(layers.values()))[0].shape[1]
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank} | config
    (folder / "adapter_config.json").write_text(json.dumps(written))
    tensors = {}
    for path, (a, b) in layers.items():
        tensors |= {
            f"base_model.model.{path}.lora_A.weight": mx.contiguous(a.T),
            f"base_model.model.{path}.lora_B.weight": mx.contiguous(b.T),
        }
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    return folder
