"""Claude Code, which speaks Anthropic's messages alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vllm_metal.agents.agent import Agent, Settings, Start, Target
from vllm_metal.paths import expand_home

#: What would send it elsewhere, or with a key that is not for us.
_ELSEWHERE = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
)
#: Every model that it picks by itself, for whatever part of the work.
_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


def _start(target: Target, folder: Path) -> Start:
    # Variables of the user's own settings would win over those of the process.
    file = folder / "claude.json"
    return Start(
        ("--settings", str(file)),
        # The window is looked for before settings are read, too.
        {**dict.fromkeys(_ELSEWHERE), **_window(target)},
        {file: json.dumps({"env": _variables(target)}, indent=2)},
    )


def _settings(target: Target) -> Settings:
    home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or expand_home("~/.claude"))
    return Settings(home / "settings.json", {"env": _variables(target)})


def _variables(target: Target) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        **dict.fromkeys(_MODELS, target.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # It would begin each prompt with a line of its own making, and no prefix would be found again.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        **_window(target),
    }


def _window(target: Target) -> dict[str, str]:
    if not target.max_model_len:
        return {}
    return {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.max_model_len),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.max_answer_len),
    }


CLAUDE = Agent("claude", "claude", "npm install -g @anthropic-ai/claude-code", _start, _settings)
