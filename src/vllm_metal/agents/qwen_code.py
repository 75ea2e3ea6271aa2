"""Qwen Code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_metal.agents.agent import Agent, Settings, Start, Target
from vllm_metal.paths import expand_home


def _start(target: Target, folder: Path) -> Start:
    arguments = ("--auth-type", "openai", "--openai-base-url", target.base_url, "--model", target.model)
    key = {"OPENAI_API_KEY": target.key}
    if not (window := _window(target)):
        return Start(arguments, key)
    # Only settings can tell it, of which these are the ones that all others go before.
    file = folder / "qwen.json"
    variables = {**key, "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(file)}
    return Start(arguments, variables, {file: json.dumps({"model": window})})


def _settings(target: Target) -> Settings:
    auth = {"selectedType": "openai", "baseUrl": target.base_url, "apiKey": target.key}
    entries = {"security": {"auth": auth}, "model": {"name": target.model, **_window(target)}}
    return Settings(Path(expand_home("~/.qwen/settings.json")), entries)


def _window(target: Target) -> dict[str, Any]:
    return {"generationConfig": {"contextWindowSize": target.max_model_len}} if target.max_model_len else {}


QWEN_CODE = Agent("qwen-code", "qwen", "npm install -g @qwen-code/qwen-code", _start, _settings)
