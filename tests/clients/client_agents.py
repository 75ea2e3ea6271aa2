"""Coding agents, and how one is run: alone with its folder, and with no way out but to this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import client_packages
from client_guide import snippet

from server_process import METAL

TIMEOUT_S = 300
#: Nothing listens there.
_NO_WAY_OUT = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost,::1"}


@dataclass(frozen=True)
class Agent:
    """`title` is that of its section in the guide, `shell` its tool that runs a command. `again` goes on with
    the last conversation. `variables` have it start nothing for which it would need the network.
    """

    title: str
    program: str
    shell: str
    again: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    command_key: str = "command"
    variables: Mapping[str, str] = field(default_factory=dict)

    def call(self, command: str) -> dict[str, Any]:
        """What a model writes to have `command` run."""
        return {"name": self.shell, "arguments": {self.command_key: command, **self.arguments}}


AGENTS = [
    Agent("Claude Code", "claude", "Bash", "claude -- --continue -p", {"description": "Says it"}),
    Agent(
        "Codex",
        "codex",
        "exec_command",
        "codex -- exec --skip-git-repo-check resume --last",
        command_key="cmd",
    ),
    Agent(
        "opencode",
        "opencode",
        "bash",
        "opencode -- run --continue",
        {"description": "Says it"},
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    Agent(
        "Qwen Code",
        "qwen",
        "run_shell_command",
        "qwen-code -- -y --continue -p",
        {"description": "Says it", "is_background": False},
    ),
    Agent("Continue", "cn", "Bash", "continue -- --auto --resume -p"),
    Agent("pi", "pi", "bash", "pi -- --continue -p", variables={"PI_OFFLINE": "1"}),
]


def ask(agent: Agent, server_url: str, home: Path, cache_dir: Path) -> str:
    """What it wrote to stdout, started as the guide says but for the port of the server."""
    return _run(agent, snippet(agent.title, "sh", server_url), server_url, home, cache_dir)


def ask_again(agent: Agent, server_url: str, home: Path, cache_dir: Path) -> str:
    return _run(agent, f"metal launch {agent.again} 'And once more.'", server_url, home, cache_dir)


def _run(agent: Agent, command: str, server_url: str, home: Path, cache_dir: Path) -> str:
    node, program = client_packages.agent(agent.program, cache_dir)
    work = home / "work"
    work.mkdir(parents=True, exist_ok=True)
    env = {
        "PATH": ":".join(map(str, (program, node, Path(METAL).parent, "/usr/bin", "/bin"))),
        "HOME": str(home),
        "METAL_SERVER_PORT": str(urlsplit(server_url).port),
        **_NO_WAY_OUT,
        **agent.variables,
    }
    process = subprocess.Popen(
        ["bash", "-c", command],
        env=env,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        # Whatever it started ends with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, f"{output}\n{errors}"
    return output
