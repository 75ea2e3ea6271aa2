"""Model folders of real shapes with random weights: right for speed, and their answers never end."""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_config, save_model

_CONTEXT = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_QWEN2 = {**_CONTEXT, "model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN2,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
    # Qwen2.5-0.5B
    "0.5b": {
        **_QWEN2,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    # Llama-3.1-8B
    "8b": {
        **_CONTEXT,
        "model_type": "llama",
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
}

# Byte-level tokens that are words. Others may be an end, or half of a character, which servers hold back.
_WORD = re.compile(r"Ġ?[A-Za-z]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def make(preset: str, tokenizer: Path, folder: Path) -> None:
    """Write `folder`: bfloat16 weights and the tokenizer of the folder `tokenizer`."""
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder)
    description = json.loads((tokenizer / "tokenizer.json").read_text())
    token_ids = description["model"]["vocab"] | {
        token["content"]: token["id"] for token in description["added_tokens"]
    }
    end = json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    config = PRESETS[preset] | {
        "vocab_size": max(token_ids.values()) + 1,
        "dtype": "bfloat16",
        "eos_token_id": token_ids[end],
    }

    implementation = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = implementation.Model(implementation.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    # A row of zeros gives the logit 0, which is never the highest of so many.
    is_word = [False] * config["vocab_size"]
    for token, token_id in token_ids.items():
        is_word[token_id] = bool(_WORD.fullmatch(token))
    head = model.model.embed_tokens if config["tie_word_embeddings"] else model.lm_head
    head.weight = head.weight * mx.array(is_word)[:, None].astype(mx.bfloat16)
    save_model(folder, model)
    save_config(config, folder / "config.json")
