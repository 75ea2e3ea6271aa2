"""Coding agents, started by `metal launch`: rounds of tool calls, and conversations of two turns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import client_agents
import pytest
from client_agents import AGENTS, Agent

import parrot_model
import scripted_model
import tokenizer_packages
from server_process import ServerProcess
from vllm_metal.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COMMAND = "echo $((40 + 2)) is the answer"
#: Only a shell makes it of the command.
SAID = "42 is the answer"

each_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.title)


@each_agent
def test_a_round_of_tool_calls(agent: Agent, tmp_path: Path, cache_dir: Path):
    def script(prompt: str) -> str:
        if SAID in scripted_model.last_message(prompt):
            return f"It says: {SAID}."
        # Some ask for a title too, without tools.
        if f'"name": "{agent.shell}"' not in prompt:
            return "Echo"
        return f"<tool_call>\n{json.dumps(agent.call(COMMAND))}\n</tool_call>"

    with scripted_model.serving("hermes", script=script, max_model_len=1 << 20) as url:
        assert f"It says: {SAID}." in client_agents.ask(agent, url, tmp_path / "home", cache_dir)


@pytest.fixture(scope="module")
def parrot(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model that has one answer, behind a real tokenizer and template."""
    folder = tmp_path_factory.mktemp("model") / "parrot"
    parrot_model.save(tokenizer_packages.tokenizer("qwen3", cache_dir), folder)
    with ServerProcess(str(folder), env={}) as process:
        yield process.ready()


@each_agent
def test_a_conversation(agent: Agent, parrot: ServerProcess, tmp_path: Path, cache_dir: Path):
    home = tmp_path / "home"
    assert parrot_model.SENTENCE in client_agents.ask(agent, parrot.url, home, cache_dir)
    before = _prompt_tokens(parrot)
    assert parrot_model.SENTENCE in client_agents.ask_again(agent, parrot.url, home, cache_dir)
    read, found = (now - then for now, then in zip(_prompt_tokens(parrot), before, strict=True))
    # The second turn begins as the first did.
    assert found > 0.9 * read > 0


def _prompt_tokens(server: ServerProcess) -> list[float]:
    """How many the server has read, and of how many it had the KV already."""
    names = ("prompt_tokens_total", "prefix_cache_hits_total")
    metrics = Client(server.url).metrics()
    return [float(re.findall(rf"^vllm:{name}\{{.*\}} (.*)$", metrics, re.MULTILINE)[0]) for name in names]
