"""Builds mlx-lm's model classes from GGUF files."""

from __future__ import annotations

import logging
import re
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.mlx import gguf_cache
from vllm_metal.engine.mlx.gguf import GROUP_SIZE, GGUFFile
from vllm_metal.engine.mlx.gguf_config import ROPE_TENSORS, architecture_of, read_config
from vllm_metal.errors import UnsupportedModel

logger = logging.getLogger(__name__)

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_ROUND_LAYERS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# What is called otherwise, or is there besides, by mlx-lm's name of the family.
_OWN_MODULES = {
    "gemma2": _NORMS_ROUND_LAYERS,
    "gemma3_text": _NORMS_ROUND_LAYERS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3_moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
        "ffn_up_exps": "mlp.switch_mlp.up_proj",
        "ffn_down_exps": "mlp.switch_mlp.down_proj",
    },
}
# Of models that see, which mlx-lm's classes for text leave out too.
_IMAGE_PARTS = ("v.", "mm.")
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<parameter>weight|bias)")


def load_model(file: GGUFFile) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its config. Raises as `read_config` does."""
    config = read_config(file)
    if (kept := gguf_cache.load(file)) is not None:
        try:
            return _model(config, kept), config
        # mlx-lm raises whatever it stumbles over.
        except Exception as exc:
            logger.warning("what was kept of `%s` does not fit; it is converted again: %s", file.path, exc)
    logger.info("converting `%s` for MLX, %s", file.path, file.quantization)
    weights = _weights(file, config)
    file.require_unchanged()
    gguf_cache.store(file, weights)
    return _model(config, weights), config


def _model(config: dict[str, Any], weights: dict[str, mx.array]) -> nn.Module:
    implementation = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = implementation.Model(implementation.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)

    def quantization(path: str, module: nn.Module) -> bool | dict[str, int]:
        if f"{path}.scales" not in weights:
            return False
        bits = weights[f"{path}.weight"].shape[-1] * 32 // module.weight.shape[-1]
        return {"group_size": GROUP_SIZE, "bits": bits}

    nn.quantize(model, class_predicate=quantization)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model


def _weights(file: GGUFFile, config: dict[str, Any]) -> dict[str, mx.array]:
    """By mlx-lm's names, evaluated one by one."""
    family = config["model_type"]
    modules = _MODULES | _OWN_MODULES.get(family, {})
    interleaved = {}
    if family == "llama":
        interleaved = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    # mlx-lm's Gemma adds 1 to its norms, as the files have done already.
    adds_one = architecture_of(file).startswith("gemma")
    weights = {}
    for tensor in file.tensors.values():
        if tensor.name in ROPE_TENSORS or tensor.name.startswith(_IMAGE_PARTS):
            continue
        match = _TENSOR_NAME.fullmatch(tensor.name)
        if match is None or match["module"] not in modules:
            raise UnsupportedModel(
                f"`{file.path}` holds the tensor `{tensor.name}`, which is not known",
                hint="use an MLX version of the model",
            )
        path = modules[match["module"]]
        if match["layer"] is not None:
            path = f"model.layers.{match['layer']}.{path}"
        for name, array in file.arrays(tensor).items():
            if match["module"] in interleaved:
                array = _uninterleaved(array, interleaved[match["module"]])
            elif adds_one and match["module"].endswith("norm"):
                array = array.astype(mx.float32) - 1
            mx.eval(array)
            weights[f"{path}.{match['parameter'] if name == 'weight' else name}"] = array
    return weights


def _uninterleaved(array: mx.array, num_heads: int) -> mx.array:
    """Llama files rotate neighbouring rows of a head, MLX the head's two halves.

    Packing runs along the last axis, so weights, scales and biases move alike.
    """
    halves = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
