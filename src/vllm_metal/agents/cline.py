"""Cline's CLI."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_metal.agents.agent import Agent, Start, Target

_PROVIDER = "openai-compatible"


def _start(target: Target, folder: Path) -> Start:
    file = folder / "cline.json"
    provider = {
        "provider": _PROVIDER,
        "apiKey": target.key,
        "model": target.model,
        "baseUrl": target.base_url,
    }
    providers = {
        "version": 1,
        "modes": {},
        "lastUsedProvider": _PROVIDER,
        "providers": {
            _PROVIDER: {
                "settings": provider,
                "updatedAt": "1970-01-01T00:00:00.000Z",
                "tokenSource": "manual",
            }
        },
    }
    return Start(
        ("--provider", _PROVIDER, "--model", target.model),
        {"CLINE_PROVIDER_SETTINGS_PATH": str(file)},
        {file: json.dumps(providers)},
    )


# Its settings are written by `cline auth`.
CLINE = Agent("cline", "cline", "npm install -g cline", _start)
