"""Codex, which speaks OpenAI's responses alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_metal.agents.agent import Agent, Settings, Start, Target
from vllm_metal.paths import expand_home
from vllm_metal.toml_document import render

_KEY = "METAL_API_KEY"


def _start(target: Target, folder: Path) -> Start:
    # By its name: what is on a command line, every user of the machine may read.
    entries = _entries(target, {"env_key": _KEY})
    overrides = [f"{name}={render(value)}" for name, value in entries.items()]
    return Start(tuple(word for each in overrides for word in ("-c", each)), {_KEY: target.key})


def _settings(target: Target) -> Settings:
    home = Path(os.environ.get("CODEX_HOME") or expand_home("~/.codex"))
    headers = {"http_headers": {"Authorization": f"Bearer {target.api_key}"}} if target.api_key else {}
    return Settings(home / "config.toml", _entries(target, headers))


def _entries(target: Target, authorization: dict[str, Any]) -> dict[str, Any]:
    provider = {"name": "vllm-metal", "base_url": target.base_url, "wire_api": "responses", **authorization}
    entries = {"model": target.model, "model_provider": "metal", "model_providers.metal": provider}
    return entries | ({"model_context_window": target.max_model_len} if target.max_model_len else {})


CODEX = Agent("codex", "codex", "npm install -g @openai/codex", _start, _settings)
