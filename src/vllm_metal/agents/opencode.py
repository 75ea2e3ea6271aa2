"""opencode."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_metal.agents.agent import Agent, Settings, Start, Target
from vllm_metal.paths import expand_home


def _start(target: Target, folder: Path) -> Start:
    return Start(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(_entries(target))})


def _settings(target: Target) -> Settings:
    home = Path(os.environ.get("XDG_CONFIG_HOME") or expand_home("~/.config"))
    return Settings(home / "opencode" / "opencode.json", _entries(target))


def _entries(target: Target) -> dict[str, Any]:
    model: dict[str, Any] = {"name": target.model}
    if target.max_model_len:
        model["limit"] = {"context": target.max_model_len, "output": target.max_answer_len}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "vllm-metal",
        "options": {"baseURL": target.base_url, "apiKey": target.key},
        "models": {target.model: model},
    }
    name = f"metal/{target.model}"
    # The small one writes titles.
    return {"provider": {"metal": provider}, "model": name, "small_model": name}


OPENCODE = Agent("opencode", "opencode", "npm install -g opencode-ai", _start, _settings)
