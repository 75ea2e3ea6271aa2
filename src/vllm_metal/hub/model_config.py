"""What a `config.json` tells of a model, in any of the ways that its publishers write it."""

from __future__ import annotations

from typing import Any

# For configs that name no limit at all: a length that every model of the last years handles.
_FALLBACK_CONTEXT_LENGTH = 4096
_CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "n_positions",
    "seq_length",
    "model_max_length",
)


def context_length(config: dict[str, Any]) -> int:
    """Tokens that the model's positions reach, with the stretch of its rope scaling."""
    text_config = config | (config.get("text_config") or {})
    lengths = [text_config.get(key) for key in _CONTEXT_LENGTH_KEYS]
    length = next((each for each in lengths if isinstance(each, int) and each > 1), None)
    if length is None:
        return _FALLBACK_CONTEXT_LENGTH
    scaling = text_config.get("rope_scaling") or text_config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    # The other kinds, and Gemma 3 with its linear one, already count the stretch in.
    if kind in ("linear", "dynamic", "yarn") and not config.get("model_type", "").startswith("gemma3"):
        original = scaling.get("original_max_position_embeddings", length)
        length = max(length, int(original * scaling.get("factor", 1)))
    return length


def quantization_name(config: dict[str, Any]) -> str | None:
    """What MLX's own quantization in a config is called."""
    quantization = config.get("quantization")
    if quantization is None:
        return None
    mode = quantization.get("mode", "affine")
    return f"{quantization['bits']}-bit" if mode == "affine" else str(mode)


def number_format(config: dict[str, Any]) -> str | None:
    """The quantization, or the type of weights that have none."""
    text_config = config | (config.get("text_config") or {})
    dtype = text_config.get("dtype") or text_config.get("torch_dtype")
    return quantization_name(config) or (dtype if isinstance(dtype, str) else None)
