"""Continue's CLI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_metal.agents.agent import Agent, Settings, Start, Target
from vllm_metal.paths import expand_home

_HEADING = {"name": "vllm-metal", "version": "1.0.0", "schema": "v1"}


def _start(target: Target, folder: Path) -> Start:
    # Whatever is JSON is YAML too.
    file = folder / "continue.yaml"
    settings = {**_HEADING, **_entries(target)}
    return Start(("--config", str(file)), files={file: json.dumps(settings, indent=2)})


def _settings(target: Target) -> Settings:
    return Settings(Path(expand_home("~/.continue/config.yaml")), _entries(target), _HEADING)


def _entries(target: Target) -> dict[str, Any]:
    model: dict[str, Any] = {
        "name": "vllm-metal",
        "provider": "openai",
        "model": target.model,
        "apiBase": target.base_url,
        "apiKey": target.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    if target.max_model_len:
        model["contextLength"] = target.max_model_len
        model["defaultCompletionOptions"] = {"maxTokens": target.max_answer_len}
    return {"models": [model]}


CONTINUE = Agent("continue", "cn", "npm install -g @continuedev/cli", _start, _settings)
