"""What a model is for, as its folder tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_metal.hub.model_kind import ModelKind, model_kind

POOLING = [
    {"type": "sentence_transformers.models.Transformer"},
    {"type": "sentence_transformers.models.Pooling"},
]
LOGITS = [{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]


def folder(path: Path, config: object, modules: object = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    return path


@pytest.mark.parametrize(
    ("name", "config", "modules", "kind"),
    [
        ("Qwen3-0.6B", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None, "generate"),
        ("a", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, POOLING, "embed"),
        ("a", {"model_type": "qwen3", "architectures": ["Qwen3Model"]}, None, "embed"),
        ("a", {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, None, "embed"),
        ("a", {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, None, "score"),
        ("a", {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, None, "score"),
        ("a", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, LOGITS, "score"),
        ("Qwen3-Embedding-0.6B-4bit", {"model_type": "qwen3"}, None, "embed"),
        ("qwen3_reranker_8bit", {"model_type": "qwen3"}, None, "score"),
        ("embedded-systems-7b", {"model_type": "qwen3"}, None, "generate"),
        ("a", {"architectures": None}, {"no": "list"}, "generate"),
        ("a", ["no object"], ["no object"], "generate"),
        ("a", {"model_type": ["bert"]}, None, "generate"),
    ],
)
def test_a_folder_tells_what_its_model_is_for(name, config, modules, kind, tmp_path):
    assert model_kind(folder(tmp_path / name, config, modules)) == kind


def test_the_cache_of_the_hub_names_models_above_their_snapshots(tmp_path):
    cached = tmp_path / "models--org--Qwen3-Embedding-0.6B-4bit" / "snapshots" / "0123abcd"
    assert model_kind(folder(cached, {"model_type": "qwen3"})) is ModelKind.EMBED


def test_files_generate(tmp_path):
    (tmp_path / "embedding.gguf").write_bytes(b"GGUF")
    assert model_kind(tmp_path / "embedding.gguf") is ModelKind.GENERATE
    assert model_kind(tmp_path / "missing") is ModelKind.GENERATE
