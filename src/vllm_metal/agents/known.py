"""The agents that can be started here."""

from __future__ import annotations

from vllm_metal.agents.agent import Agent
from vllm_metal.agents.aider import AIDER
from vllm_metal.agents.claude import CLAUDE
from vllm_metal.agents.cline import CLINE
from vllm_metal.agents.codex import CODEX
from vllm_metal.agents.continue_cli import CONTINUE
from vllm_metal.agents.opencode import OPENCODE
from vllm_metal.agents.pi import PI
from vllm_metal.agents.qwen_code import QWEN_CODE

AGENTS = {each.name: each for each in (AIDER, CLAUDE, CLINE, CODEX, CONTINUE, OPENCODE, PI, QWEN_CODE)}


def find(name: str) -> Agent | None:
    """The agent of that name, or whose program is called so."""
    return AGENTS.get(name) or next((each for each in AGENTS.values() if each.program == name), None)
