"""What models take at once is what the server lets requests have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_metal.hub.served_length import embedding_length, served_length


def folder(path: Path, config: dict[str, Any], **files: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "config", "advised", "length"),
    [
        ("chat", {"model_type": "llama", "max_position_embeddings": 131072}, None, 131072),
        ("chat", {"model_type": "llama", "max_position_embeddings": 4096}, 40, 4096),
        ("an-embedding", {"model_type": "qwen3", "max_position_embeddings": 32768}, None, 8192),
        ("encoder", {"model_type": "bert", "max_position_embeddings": 512}, None, 512),
        ("encoder", {"model_type": "bert", "max_position_embeddings": 512}, 256, 256),
        ("encoder", {"model_type": "bert", "max_position_embeddings": 512}, 0, 512),
        ("encoder", {"model_type": "bert", "max_position_embeddings": 512}, True, 512),
        ("encoder", {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, None, 512),
    ],
)
def test_by_kind(name: str, config: dict[str, Any], advised: Any, length: int, tmp_path: Path) -> None:
    files = {} if advised is None else {"sentence_bert_config": {"max_seq_length": advised}}
    assert served_length(folder(tmp_path / name, config, **files), config) == length


def test_what_a_model_reads_can_be_more_than_is_advised(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 32768}
    assert embedding_length(folder(tmp_path / "an-embedding", config), config) == 32768
