"""A tiny random model of the same kind as a large one, to try out what the large one is too slow to show."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING

#: Short enough that a few tokens pass it and rotate what is behind it.
WINDOW = 8
VOCAB_SIZE = 128

_TINY: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB_SIZE,
    "sliding_window": WINDOW,
}
_MAX_LAYERS = 8


def make_twin(config: dict[str, Any]) -> Any | None:
    """A float32 model with every kind of layer that `config` has, or None if that cannot be made."""
    text_config = {**config, **(config.get("text_config") or {})}
    tiny = {key: value for key, value in text_config.items() if key not in ("quantization", "text_config")}
    tiny |= {key: value for key, value in _TINY.items() if isinstance(tiny.get(key), int)}
    num_layers = min(int(tiny.get("num_hidden_layers", 0)), _MAX_LAYERS)
    tiny["num_hidden_layers"] = num_layers
    if isinstance(tiny.get("layer_types"), list):
        tiny["layer_types"] = tiny["layer_types"][:num_layers]
    model_type = MODEL_REMAPPING.get(tiny["model_type"], tiny["model_type"])
    try:
        module = importlib.import_module(f"mlx_lm.models.{model_type}")
        model = module.Model(module.ModelArgs.from_dict(tiny))
        model.set_dtype(mx.float32)
        model.eval()
        mx.eval(model.parameters())
        return model
    # Anything may be wrong with a config cut down so: then there is no twin.
    except Exception:
        return None
