"""Libraries that speak to the server: each by its snippet in the guide, and then put through its paces."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from client_agents import AGENTS
from client_guide import clients, snippet
from client_process import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
ANSWER = "The capital of France is Paris.\n"
EXTRACTED = "name='Ava Stone' age=25\n"
PYTHON = {
    "Instructor": "instructor",
    "LangChain": "langchain",
    "LiteLLM": "litellm",
    "Pydantic AI": "pydantic-ai",
}
JAVASCRIPT = {"openai, for JavaScript": "openai_client", "AI SDK": "ai_sdk_client"}


@pytest.mark.parametrize("client", PYTHON)
def test_python(python_of, server, tmp_path, client):
    name = PYTHON[client]
    python = [python_of(name), "-I"]
    printed = run([*python, "-c", snippet(client, "python", server.url)], cwd=tmp_path)
    assert printed == (EXTRACTED if client == "Instructor" else ANSWER)
    run([*python, SCRIPTS / f"{name.replace('-', '_')}_client.py", server.url], cwd=tmp_path)


@pytest.mark.parametrize("client", JAVASCRIPT)
def test_javascript(javascript, server, client):
    node, folder = javascript
    # A program from stdin finds its packages from the current folder.
    command = [node, "--input-type=module", "-", server.url]
    assert run(command, cwd=folder, stdin=snippet(client, "js", server.url)) == ANSWER
    run(command, cwd=folder, stdin=(SCRIPTS / f"{JAVASCRIPT[client]}.mjs").read_text())


def test_openai(server, tmp_path):
    program = snippet("openai, for Python", "python", server.url)
    assert run([sys.executable, "-I", "-c", program], cwd=tmp_path) == ANSWER


def test_llm(python_of, server, tmp_path):
    bin_folder = python_of("llm").parent
    (tmp_path / "extra-openai-models.yaml").write_text(snippet("llm", "yaml", server.url))

    def llm(command: str) -> str:
        return run(["bash", "-c", command], cwd=tmp_path, bin_folder=bin_folder, LLM_USER_PATH=str(tmp_path))

    command = snippet("llm", "sh", server.url)
    assert llm(command) == ANSWER
    assert llm(f"{command.rstrip()} --no-stream") == ANSWER
    assert "Rome" in llm("llm --continue -o temperature 0 'And of Italy?'")


def test_the_guide_names_no_other_client():
    others = {"openai, for Python", "anthropic, for Python", "llm", "lm-eval", "AIPerf"}
    assert clients() == {*PYTHON, *JAVASCRIPT, *others, *(agent.title for agent in AGENTS)}
