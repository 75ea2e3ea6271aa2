"""What a model is for, as its folder tells: chats, vectors of texts, or judging pairs of them."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

#: Encoders that answer nothing, whatever their heads. Not all of them can be run.
_ENCODERS = {
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
}
_EMBEDDING_NAME = re.compile(r"(?<![a-z])embed(ding|dings)?(?![a-z])", re.IGNORECASE)
_RERANKER_NAME = re.compile(r"(?<![a-z])rerank(er|ing)?(?![a-z])", re.IGNORECASE)


class ModelKind(StrEnum):
    """In vLLM's words."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


def model_kind(path: Path) -> ModelKind:
    """Of a model at `path`. What cannot be read is no reason to fail here: loading will."""
    if not path.is_dir():
        return ModelKind.GENERATE
    config = _read(path / "config.json")
    config = config if isinstance(config, dict) else {}
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    parts = [part for part, _ in modules(path)]
    if architecture.endswith("ForSequenceClassification") or "LogitScore" in parts:
        return ModelKind.SCORE
    if "Pooling" in parts:
        return ModelKind.EMBED
    if str(config.get("model_type")) in _ENCODERS:
        return ModelKind.EMBED
    # A conversion often keeps nothing but the name to tell it from a chat model. In the hub's cache that is
    # the name of the folder of all snapshots.
    name = path.parent.parent.name if path.parent.name == "snapshots" else path.name
    if _RERANKER_NAME.search(name):
        return ModelKind.SCORE
    if _EMBEDDING_NAME.search(name) or architecture.endswith("Model"):
        return ModelKind.EMBED
    return ModelKind.GENERATE


def modules(folder: Path) -> list[tuple[str, Path]]:
    """The parts that `modules.json` of sentence-transformers lists, like "Pooling", each with its folder."""
    listed = _read(folder / "modules.json")
    return [
        (str(module.get("type")).rpartition(".")[2], folder / str(module.get("path") or ""))
        for module in (listed if isinstance(listed, list) else ())
        if isinstance(module, dict)
    ]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
