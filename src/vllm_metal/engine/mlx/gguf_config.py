"""The config of a model as mlx-lm's classes read it, from the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.errors import NotAModel, UnsupportedModel
from vllm_metal.hub.gguf_header import damaged

#: Tensors of which the config tells all that the model needs.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Of layers, of rows, of tokens: what MLX can count.
_MAX_COUNT = 2**31 - 1
_LLAMA3_FACTORS, _LONG_FACTORS, _SHORT_FACTORS = ROPE_TENSORS
# Llama 3's scaling as all its releases set it; only the factor differs between them.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Metadata:
    """A file's metadata of its architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._prefix = f"{architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(self._prefix + key, default)

    def count(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Raises NotAModel where there is none, UnsupportedModel where each layer has its own."""
        value = self._of_all_layers(key, default)
        if type(value) is not int or not minimum <= value <= _MAX_COUNT:
            raise self._unusable(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive one that float32 can hold. Raises as `count` does."""
        value = self._of_all_layers(key, default)
        if type(value) not in (int, float) or not 2.0**-126 <= value < 2.0**128:
            raise self._unusable(key, value)
        return float(value)

    def _of_all_layers(self, key: str, default: float | None) -> Any:
        value = self.get(key, default)
        if isinstance(value, list):
            raise UnsupportedModel(
                f"the layers of `{self.file.path}` differ in `{self._prefix}{key}`, which is not supported",
                hint="use an MLX version of the model",
            )
        return value

    def _unusable(self, key: str, value: object) -> NotAModel:
        name = f"`{self._prefix}{key}`"
        problem = f"lacks {name}" if value is None else f"has {str(value)[:40]!r} for {name}, which cannot be"
        return NotAModel(f"`{self.file.path}` {problem}")

    @property
    def head_dim(self) -> int:
        whole = self.count("embedding_length") // self.count("attention.head_count")
        return self.count("attention.key_length", whole)

    @property
    def rotated_dim(self) -> int:
        rotated = self.count("rope.dimension_count", self.head_dim)
        if rotated % 2 or rotated > self.head_dim:
            raise self._unusable("rope.dimension_count", rotated)
        return rotated


def _nothing_else(metadata: _Metadata) -> dict[str, Any]:
    return {}


def _qwen3_moe(metadata: _Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(metadata: _Metadata) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: _Metadata) -> dict[str, Any]:
    if metadata.get("final_logit_softcapping"):
        raise UnsupportedModel(f"`{metadata.file.path}` caps its logits, which is not supported for Gemma 3")
    window = metadata.count("attention.sliding_window", 0, minimum=0)
    return {
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=62),
        "sliding_window": window,
        "sliding_window_pattern": _sliding_window_pattern(metadata) if window else 1,
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "max_position_embeddings": metadata.count("context_length"),
    }


def _query_scalar(metadata: _Metadata, *, layers_of_27b: int) -> int:
    """What the files leave out: only the largest of each family does not scale by the size of its heads."""
    if metadata.count("block_count") == layers_of_27b:
        return metadata.count("embedding_length") // metadata.count("attention.head_count")
    return metadata.head_dim


def _sliding_window_pattern(metadata: _Metadata) -> int:
    """Every so many layers one sees all tokens."""
    pattern = metadata.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, list):
        return metadata.count("attention.sliding_window_pattern", 6)
    period = pattern.index(False) + 1 if False in pattern else len(pattern) + 1
    if pattern != [bool((layer + 1) % period) for layer in range(len(pattern))]:
        raise UnsupportedModel(f"the sliding windows of `{metadata.file.path}` follow no known pattern")
    return period


def _phi3(metadata: _Metadata) -> dict[str, Any]:
    config = {
        "partial_rotary_factor": metadata.rotated_dim / metadata.head_dim,
        # Its windows are left out by all engines; the class has none.
        "max_position_embeddings": metadata.count("context_length"),
    }
    tensors = metadata.file.tensors
    if _LONG_FACTORS not in tensors or _SHORT_FACTORS not in tensors:
        return config
    factors = {
        key: metadata.file.arrays(tensors[name])["weight"].astype(mx.float32).tolist()
        for key, name in (("long_factor", _LONG_FACTORS), ("short_factor", _SHORT_FACTORS))
    }
    return config | {
        "rope_scaling": {"type": "longrope", **factors},
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
    }


@dataclass(frozen=True, slots=True)
class _Family:
    """`model_type` is mlx-lm's name; `scalings` are the kinds of rope scaling that its class knows."""

    model_type: str
    settings: Callable[[_Metadata], dict[str, Any]] = _nothing_else
    scalings: tuple[str, ...] = ()
    overflows_float16: bool = False


_FAMILIES = {
    "llama": _Family("llama", scalings=("linear", "yarn")),
    "mistral": _Family("llama", scalings=("linear", "yarn")),
    "qwen2": _Family("qwen2", scalings=("linear", "yarn")),
    "qwen3": _Family("qwen3", scalings=("linear", "yarn")),
    "qwen3moe": _Family("qwen3_moe", _qwen3_moe),
    "gemma": _Family("gemma", overflows_float16=True),
    "gemma2": _Family("gemma2", _gemma2, overflows_float16=True),
    "gemma3": _Family("gemma3_text", _gemma3, scalings=("linear",), overflows_float16=True),
    "phi3": _Family("phi3", _phi3),
}


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Raises UnsupportedModel for an unknown architecture or scaling, NotAModel for missing metadata."""
    architecture = architecture_of(file)
    check_architecture(architecture)
    if "token_embd.weight" not in file.tensors:
        raise NotAModel(f"`{file.path}` holds no language model: `token_embd.weight` is missing")
    metadata, family = _Metadata(file, architecture), _FAMILIES[architecture]
    if metadata.count("expert_count", 0, minimum=0) and family.settings is not _qwen3_moe:
        raise UnsupportedModel(
            f"mixtures of experts of the architecture `{architecture}` are not supported in GGUF files",
            hint="use an MLX version of the model",
        )
    if metadata.rotated_dim != metadata.head_dim and family.settings is not _phi3:
        raise UnsupportedModel(
            f"`{file.path}` rotates only a part of each attention head, which is not supported"
        )
    return _settings(metadata, family) | family.settings(metadata)


def architecture_of(file: GGUFFile) -> str:
    return str(file.metadata.get("general.architecture"))


def check_architecture(architecture: str) -> None:
    """Raises UnsupportedModel."""
    if architecture not in _FAMILIES:
        *names, last = _FAMILIES
        raise UnsupportedModel(
            f"model architecture `{architecture}` is not supported in GGUF files",
            hint=f"supported are {', '.join(names)} and {last}; for others use an MLX version of the model",
        )


def _settings(metadata: _Metadata, family: _Family) -> dict[str, Any]:
    """What the classes of all families read."""
    tensors = metadata.file.tensors
    num_heads, num_layers = metadata.count("attention.head_count"), metadata.count("block_count")
    _check_size(metadata, num_layers)
    context_length = metadata.count("context_length")
    if window := metadata.count("attention.sliding_window", 0, minimum=0):
        # Within the window a sliding-window layer is a full one, which is all that most classes offer.
        context_length = min(context_length, window)
    return {
        "model_type": family.model_type,
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": num_layers,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", num_heads),
        "head_dim": metadata.head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": context_length,
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, family),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "dtype": _dtype({tensor.type_name for tensor in tensors.values()}, family),
    }


def _check_size(metadata: _Metadata, num_layers: int) -> None:
    """Before a model of that many layers is made, and a token looked up that it has not."""
    file = metadata.file
    held = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if held != num_layers:
        raise damaged(file.path, f"it holds {held} of {num_layers} layers")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    num_rows = file.tensors["token_embd.weight"].shape[0]
    if isinstance(tokens, list) and len(tokens) > num_rows:
        raise damaged(file.path, f"it holds {num_rows} embeddings of {len(tokens)} tokens")


def _dtype(types: set[str], family: _Family) -> str:
    """What the matrices are kept in; the norms are float32 in every file."""
    if types == {"F32"}:
        return "float32"
    return "bfloat16" if "BF16" in types or family.overflows_float16 else "float16"


def _rope_scaling(metadata: _Metadata, family: _Family) -> dict[str, str | float] | None:
    if _LLAMA3_FACTORS in metadata.file.tensors:
        return _llama3_scaling(metadata)
    kind, factor = metadata.get("rope.scaling.type", "linear"), metadata.get("rope.scaling.factor")
    # By 0 is how writers say that there is none.
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return None
    if kind not in family.scalings:
        raise UnsupportedModel(
            f"rope scaling `{kind}` is not supported in GGUF files", hint="use an MLX version of the model"
        )
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    named = {name: key for key, name in names.items() if metadata.get(f"rope.scaling.{key}") is not None}
    return {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")} | {
        name: metadata.number(f"rope.scaling.{key}") for name, key in named.items()
    }


def _llama3_scaling(metadata: _Metadata) -> dict[str, str | float]:
    """The settings behind the file's table of frequency divisors, checked against the whole table."""
    file = metadata.file
    table = np.array(file.arrays(file.tensors[_LLAMA3_FACTORS])["weight"].astype(mx.float32))
    factor = float(table.max())
    theta = metadata.number("rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, metadata.head_dim, 2) / metadata.head_dim)
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
