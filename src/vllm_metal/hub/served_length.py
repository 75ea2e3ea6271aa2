"""How many tokens a model takes at once, by its kind, unless the configuration says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_metal.hub import store
from vllm_metal.hub.model_config import context_length
from vllm_metal.hub.model_kind import ModelKind, model_kind

#: Encoders whose positions begin behind the id of the padding token.
_ROBERTA_KIND = {"roberta", "xlm-roberta", "camembert"}
#: Some models that embed read so much that the memory of a single text would be that of another model.
_ADVISED_EMBEDDING_TOKENS = 8192


def served_length(path: Path, config: dict[str, Any]) -> int:
    """Of the model at `path`, whose `config.json` says `config`. Raises NotAModel for other files that are
    damaged.
    """
    if model_kind(path) is ModelKind.GENERATE:
        return context_length(config)
    return min(embedding_length(path, config), _ADVISED_EMBEDDING_TOKENS)


def embedding_length(path: Path, config: dict[str, Any]) -> int:
    """What an embedding model's positions reach, and what its makers found it good for. Raises NotAModel."""
    length = context_length(config) - first_position(config)
    file = path / "sentence_bert_config.json"
    advised = store.read_json(file).get("max_seq_length") if file.exists() else None
    return min(length, advised) if type(advised) is int and advised > 0 else length


def first_position(config: dict[str, Any]) -> int:
    """The index of a text's first token among an encoder's position embeddings."""
    padding_id: int = config.get("pad_token_id", 1)
    return padding_id + 1 if config.get("model_type") in _ROBERTA_KIND else 0
