"""`metal show` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny_embedders
import tiny_folder
from server_process import METAL


def metal_show(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "config.toml"
    config.touch()
    return subprocess.run(
        [METAL, "show", *args],
        env={**os.environ, "METAL_CONFIG": str(config), **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


def shown(tmp_path: Path, *args: str, **env: str) -> Any:
    done = metal_show(tmp_path, *args, "--json", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weights, which are not looked at."""
    folder = tiny_folder.save(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:4096])
    return folder


def test_what_a_model_is(tmp_path: Path, folder: Path) -> None:
    done = metal_show(tmp_path, str(folder))
    assert done.returncode == 0, done.stderr
    facts, _, template = done.stdout.partition("\n\n")
    rows = dict(line.split(maxsplit=1) for line in facts.splitlines() if " calls " not in line)
    assert rows["model"] == str(folder)
    assert (rows["architecture"], rows["vocabulary"]) == ("llama", "257 tokens")
    assert "model.safetensors` is damaged" in rows["memory"]
    assert "tool calls    none: the chat template takes no tools\n" in facts
    assert template == tiny_folder.CHAT_TEMPLATE + "\n"


def test_what_a_model_that_embeds_is(tmp_path: Path) -> None:
    folder = tiny_embedders.save_encoder(tmp_path / "encoder")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    done = metal_show(tmp_path, str(folder))
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:3] != "end")
    assert (rows["kind"], rows["context"]) == ("embed", "40 tokens")
    assert "KV" not in rows["memory"]
    assert rows.keys().isdisjoint({"tool", "reasoning", "template"})


def test_formats_named_by_the_configuration(tmp_path: Path, folder: Path) -> None:
    told = shown(
        tmp_path, str(folder), METAL_MODELS_TOOL_CALL_PARSER="hermes", METAL_MODELS_REASONING_PARSER="none"
    )
    assert told["tool_call_parser"] == {"name": "hermes", "reason": "it was asked for by name"}
    assert told["reasoning_parser"] == {"name": "none", "reason": "the configuration says `none`"}
    assert told["config"]["model_type"] == "llama"

    done = metal_show(tmp_path, str(folder), METAL_MODELS_TOOL_CALL_PARSER="hermess")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no tool format `hermess`\n\nhint: known are ")


def test_what_a_model_takes(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "tiny")
    memory = shown(tmp_path, str(folder))["memory"]
    weight_bytes = (folder / "model.safetensors").stat().st_size
    assert memory["weight_bytes"] == weight_bytes
    ((length, size),) = memory["bytes_at"].items()
    assert length == "4096"
    assert size > weight_bytes
    assert shown(tmp_path, str(folder), METAL_ENGINE_MAX_MODEL_LEN="100")["memory"]["bytes_at"].keys() == {
        "100"
    }


def test_a_section_of_the_model_holds(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.toml").write_text(f"[models.'{folder}']\ntool_call_parser = 'hermes'\n")
    done = metal_show(tmp_path, str(folder))
    assert "tool calls    hermes: it was asked for by name\n" in done.stdout


def test_a_template_that_the_configuration_names(tmp_path: Path, folder: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    )
    told = shown(tmp_path, str(folder), METAL_MODELS_CHAT_TEMPLATE=template)
    assert told["chat_template"] == template
    assert told["tool_call_parser"]["name"] == "hermes"


def test_a_gguf_file(tmp_path: Path, smollm2_path: Path) -> None:
    told = shown(tmp_path, str(smollm2_path))
    assert (told["number_format"], told["context_length"], told["end_tokens"]) == (
        "Q4_1",
        8192,
        ["<|im_end|>"],
    )
    assert told["tool_call_parser"] == {"name": "none", "reason": "the chat template takes no tools"}


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    done = metal_show(tmp_path, "org/model", HF_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: `org/model` is not on this machine\n\nhint: run `metal pull org/model`\n"
