"""aider."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_metal.agents.agent import Agent, Settings, Start, Target
from vllm_metal.paths import expand_home


def _start(target: Target, folder: Path) -> Start:
    arguments = ("--model", _model(target), "--no-show-model-warnings")
    variables = {"OPENAI_API_BASE": target.base_url, "OPENAI_API_KEY": target.key}
    if not target.max_model_len:
        return Start(arguments, variables)
    file = folder / "aider.json"
    window = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": target.max_model_len,
        "max_output_tokens": target.max_answer_len,
    }
    files = {file: json.dumps({_model(target): window})}
    return Start((*arguments, "--model-metadata-file", str(file)), variables, files)


def _settings(target: Target) -> Settings:
    entries = {
        "model": _model(target),
        "openai-api-base": target.base_url,
        "openai-api-key": target.key,
        "show-model-warnings": False,
    }
    return Settings(Path(expand_home("~/.aider.conf.yml")), entries)


def _model(target: Target) -> str:
    """It wants to know whose API it is."""
    return f"openai/{target.model}"


AIDER = Agent("aider", "aider", "uv tool install aider-chat", _start, _settings)
