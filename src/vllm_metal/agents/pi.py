"""pi."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_metal.agents.agent import Agent, Settings, Start, Target
from vllm_metal.paths import expand_home


def _start(target: Target, folder: Path) -> Start:
    # An extension is all that one run alone can have.
    file = folder / "pi.js"
    provider = json.dumps(_provider(target), indent=2)
    return Start(
        ("--extension", str(file), "--provider", "metal", "--model", target.model),
        files={file: f'export default (pi) => pi.registerProvider("metal", {provider});\n'},
    )


def _settings(target: Target) -> Settings:
    home = Path(os.environ.get("PI_CODING_AGENT_DIR") or expand_home("~/.pi/agent"))
    return Settings(home / "models.json", {"providers": {"metal": _provider(target)}})


def _provider(target: Target) -> dict[str, Any]:
    model: dict[str, Any] = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    if target.max_model_len:
        model |= {"contextWindow": target.max_model_len, "maxTokens": target.max_answer_len}
    return {
        "baseUrl": target.base_url,
        "apiKey": target.key,
        "api": "openai-completions",
        "models": [model],
    }


PI = Agent("pi", "pi", "npm install -g @mariozechner/pi-coding-agent", _start, _settings)
