"""Builds mlx-lm's model classes from a GGUF file of the llama, mistral, qwen2 and qwen3 architectures."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.errors import NotAModel, UnsupportedModel
from vllm_metal.hub.gguf_header import GROUP_SIZE

_MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
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
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<parameter>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3's scaling as all its releases set it; only the factor differs between them.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def load_model(file: GGUFFile) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its config. Raises as `read_config` does."""
    config = read_config(file)
    weights = _weights(file, config, permuted=config["model_type"] == "llama")
    implementation = import_module(f"mlx_lm.models.{config['model_type']}")
    model = implementation.Model(implementation.ModelArgs.from_dict(config))

    def quantization(path: str, module: nn.Module) -> bool | dict[str, int]:
        if f"{path}.scales" not in weights:
            return False
        bits = weights[f"{path}.weight"].shape[-1] * 32 // module.weight.shape[-1]
        return {"group_size": GROUP_SIZE, "bits": bits}

    nn.quantize(model, class_predicate=quantization)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model, config


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The config in the form that mlx-lm's model classes read.

    Raises UnsupportedModel for an unknown architecture or scaling, NotAModel for missing metadata.
    """
    architecture = str(file.metadata.get("general.architecture"))
    check_architecture(architecture)
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(
            f"`{file.path}` is one part of a split model", hint="merge the parts into one GGUF file first"
        )
    if file.metadata.get(f"{architecture}.expert_count", 0) > 0:
        raise UnsupportedModel(
            "mixture-of-experts models are not supported in GGUF files",
            hint="use an MLX version of the model",
        )
    return _config(file, architecture)


def check_architecture(architecture: str) -> None:
    """Raises UnsupportedModel."""
    if architecture not in _MODEL_TYPES:
        raise UnsupportedModel(
            f"model architecture `{architecture}` is not supported in GGUF files",
            hint="supported are llama, mistral, qwen2 and qwen3; for others use an MLX version of the model",
        )


def _config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    def required(key: str) -> Any:
        if (value := get(key)) is None:
            raise NotAModel(f"`{file.path}` lacks the metadata `{architecture}.{key}`")
        return value

    if "token_embd.weight" not in file.tensors:
        raise NotAModel(f"`{file.path}` holds no language model: `token_embd.weight` is missing")
    hidden_size, num_heads = required("embedding_length"), required("attention.head_count")
    head_dim = get("attention.key_length") or get("rope.dimension_count") or hidden_size // num_heads
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            f"`{file.path}` rotates only a part of each attention head, which is not supported"
        )
    context_length = required("context_length")
    if window := get("attention.sliding_window"):
        # Within the window a sliding-window layer is a full one, which is all that the model class offers.
        context_length = min(context_length, window)
    theta = get("rope.freq_base", 10000.0)
    types = {tensor.type_name for tensor in file.tensors.values()}
    return {
        "model_type": _MODEL_TYPES[architecture],
        "hidden_size": hidden_size,
        "num_hidden_layers": required("block_count"),
        "intermediate_size": required("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": context_length,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, architecture, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        # What the matrices are kept in; the norms are float32 in every file.
        "dtype": "float32" if types == {"F32"} else "bfloat16" if "BF16" in types else "float16",
    }


def _rope_scaling(
    file: GGUFFile, architecture: str, head_dim: int, theta: float
) -> dict[str, str | float] | None:
    prefix = f"{architecture}.rope.scaling."
    settings = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    kind = settings.get("type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or "factor" not in settings:
        raise UnsupportedModel(
            f"rope scaling `{kind}` is not supported in GGUF files", hint="use an MLX version of the model"
        )
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    return {"rope_type": kind} | {names[key]: value for key, value in settings.items() if key in names}


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, str | float]:
    """The settings behind the file's table of frequency divisors, checked against the whole table."""
    table = np.array(file.arrays(file.tensors[_ROPE_FACTORS])["weight"].astype(mx.float32))
    factor = float(table.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    share_kept = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share_kept) / factor + share_kept)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-3):
        raise UnsupportedModel(
            f"`{file.path}` scales rope frequencies in a way that is not known",
            hint="use an MLX version of the model",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _weights(file: GGUFFile, config: dict[str, Any], *, permuted: bool) -> dict[str, mx.array]:
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in file.tensors.values():
        if tensor.name == _ROPE_FACTORS:
            continue
        match = _TENSOR_NAME.fullmatch(tensor.name)
        if match is None or match["module"] not in _MODULES:
            raise UnsupportedModel(
                f"`{file.path}` holds the tensor `{tensor.name}`, which is not known",
                hint="use an MLX version of the model",
            )
        path = _MODULES[match["module"]]
        if match["layer"] is not None:
            path = f"model.layers.{match['layer']}.{path}"
        for name, array in file.arrays(tensor).items():
            if permuted and match["module"] in num_heads:
                array = _unpermute(array, num_heads[match["module"]])
            weights[f"{path}.{match['parameter'] if name == 'weight' else name}"] = array
    return weights


def _unpermute(array: mx.array, num_heads: int) -> mx.array:
    """Undo the interleaving of each head's rows: llama files rotate neighbours, MLX the head's two halves.

    Packing runs along the last axis, so weights, scales and biases move alike.
    """
    halves = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
