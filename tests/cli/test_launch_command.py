"""`metal launch` against a scripted server, with programs that tell how they were started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripted_server import Script, refuses, replies, serving
from server_process import METAL
from vllm_metal.agents.known import AGENTS

MODEL, KEY, WINDOW = "org/model", "k-e-y", 40000
#: Tells its arguments, its variables and the files that either names.
PROGRAM = f"""\
#!{sys.executable}
import json, os, sys
arguments, variables = sys.argv[1:], dict(os.environ)
files = {{word: open(word).read() for word in [*arguments, *variables.values()] if os.path.isfile(word)}}
json.dump({{"arguments": arguments, "variables": variables, "files": files}}, sys.stdout)
"""
SETTINGS = {
    "aider": ".aider.conf.yml",
    "claude": ".claude/settings.json",
    "codex": ".codex/config.toml",
    "continue": ".continue/config.yaml",
    "opencode": ".config/opencode/opencode.json",
    "pi": ".pi/agent/models.json",
    "qwen-code": ".qwen/settings.json",
}


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        model = {"id": MODEL, "object": "model", "max_model_len": WINDOW}
        script.on("/v1/models", replies({"object": "list", "data": [model, {"id": "other"}]}))
        script.on("/v1/models/alias", replies(model))
        script.on("/v1/models/gpt", refuses(404, "no model `gpt` is served here", code="model_not_found"))
        yield script


class Shell:
    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url = home, url
        self.bin = home / "bin"
        self.bin.mkdir(parents=True)
        self.env = {
            "HOME": str(home),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "ANTHROPIC_API_KEY": "another",
            "SSL_CERT_FILE": "/certificates.pem",
        }

    def install(self, program: str) -> None:
        file = self.bin / program
        file.write_text(PROGRAM)
        file.chmod(0o755)

    def metal(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [METAL, "launch", *arguments], env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done

    def launch(self, name: str, *arguments: str) -> Any:
        options = ("--url", self.url, "--api-key", KEY)
        return json.loads(self.metal(name, *options, "--", *arguments).stdout)

    def files(self) -> set[str]:
        """Those of the home that are not ours."""
        ours = (self.bin, self.home / ".cache" / "vllm-metal", self.home / "Library" / "Caches")
        return {
            str(file.relative_to(self.home))
            for file in self.home.rglob("*")
            if file.is_file() and not any(map(file.is_relative_to, ours))
        }


@pytest.fixture
def shell(tmp_path: Path, server: Script) -> Shell:
    return Shell(tmp_path / "home", server.url)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_told_all(shell: Shell, name: str) -> None:
    agent = AGENTS[name]
    shell.install(agent.program)
    told = shell.launch(name, "-p", "two words")
    assert told["arguments"][-2:] == ["-p", "two words"]
    everything = json.dumps(told).replace("\\", "")
    for each in (shell.url, MODEL, KEY, *([str(WINDOW)] if name != "cline" else ())):
        assert each in everything
    # Command lines are for everybody to read, and so would files be.
    assert KEY not in " ".join(told["arguments"])
    assert all(Path(file).stat().st_mode & 0o077 == 0 for file in told["files"])
    assert told["variables"]["NODE_EXTRA_CA_CERTS"] == "/certificates.pem"
    assert shell.files() == set()


def test_keys_for_others_are_taken_away(shell: Shell) -> None:
    shell.install("claude")
    assert "ANTHROPIC_API_KEY" not in shell.launch("claude")["variables"]


def test_an_agent_goes_by_its_program_too(shell: Shell) -> None:
    shell.install("cn")
    assert shell.launch("cn") == shell.launch("continue")


def test_its_exit_code_is_that_of_the_command(shell: Shell) -> None:
    (shell.bin / "pi").write_text("#!/bin/sh\nexit 7\n")
    (shell.bin / "pi").chmod(0o755)
    shell.metal("pi", "--url", shell.url, code=7)


@pytest.mark.parametrize("name", AGENTS)
def test_a_dry_run_prints_a_command_that_does_the_same(shell: Shell, name: str) -> None:
    shell.install(AGENTS[name].program)
    printed = shell.metal(name, "--url", shell.url, "--api-key", KEY, "--dry-run", "--", "it's").stdout
    assert not (shell.home / ".cache").exists()
    told = shell.launch(name, "it's")
    done = subprocess.run(["sh", "-c", printed], env=shell.env, capture_output=True, text=True, check=True)
    by_hand = json.loads(done.stdout)
    for shown in (told, by_hand):
        # A shell's own.
        for variable in ("PWD", "_", "SHLVL", "OLDPWD"):
            shown["variables"].pop(variable, None)
    assert by_hand == told


def test_the_model(shell: Shell) -> None:
    shell.install("aider")
    for asked, used in (("alias", MODEL), ("gpt", None)):
        done = shell.metal("aider", "--url", shell.url, "--model", asked, "--dry-run", code=0 if used else 1)
        if used:
            assert f"openai/{used}" in done.stdout
        else:
            assert done.stderr == (
                "error: no model `gpt` is served here\n\nhint: served: `org/model`, `other`\n"
            )


def test_a_server_that_tells_no_size(shell: Shell, server: Script) -> None:
    server.on("/v1/models", replies({"object": "list", "data": [{"id": MODEL}]}))
    for name, agent in AGENTS.items():
        shell.install(agent.program)
        done = shell.metal(name, "--url", shell.url)
        assert "None" not in done.stdout
        assert done.stderr.startswith("warning: the server does not tell how long the context of `org/model`")


def test_the_configured_server_and_its_key(shell: Shell) -> None:
    shell.install("opencode")
    shell.env |= {"METAL_SERVER_PORT": shell.url.rpartition(":")[2], "METAL_SERVER_API_KEYS": KEY}
    settings = json.loads(json.loads(shell.metal("opencode").stdout)["variables"]["OPENCODE_CONFIG_CONTENT"])
    options = settings["provider"]["metal"]["options"]
    assert options == {"baseURL": f"{shell.url}/v1", "apiKey": KEY}


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["emacs"], "`emacs` is not a known agent", "known: aider, claude"),
        (["codex", "--url", "http://127.0.0.1:9"], "no server answers at", "`metal service start`"),
        (["codex"], "`codex` is not installed", "install it: `npm install -g @openai/codex`"),
        (["cline", "--write"], "the settings of `cline` are not for others to write", "`metal launch cline`"),
    ],
)
def test_refusals(shell: Shell, arguments: list[str], message: str, hint: str) -> None:
    url = [] if "--url" in arguments else ["--url", shell.url]
    done = shell.metal(*arguments, *url, code=1)
    assert done.stderr.startswith(f"error: {message}")
    assert hint in done.stderr
    assert done.stdout == ""


def test_a_server_without_a_model(shell: Shell, server: Script) -> None:
    server.on("/v1/models", replies({"object": "list", "data": []}))
    assert "serves no model" in shell.metal("codex", "--url", shell.url, code=1).stderr


def test_a_socket(tmp_path: Path) -> None:
    with serving(socket=tmp_path / "s") as script:
        done = Shell(tmp_path / "home", script.url).metal("pi", "--url", script.url, code=1)
    assert done.stderr.startswith("error: the server listens on a socket, and agents need a port")


def test_the_list(shell: Shell) -> None:
    shell.install("qwen")
    rows = dict(line.split(maxsplit=1) for line in shell.metal("--list").stdout.splitlines())
    assert list(rows) == ["AGENT", *AGENTS]
    assert rows["qwen-code"] == str(shell.bin / "qwen")
    assert rows["aider"] == "not installed: uv tool install aider-chat"


def test_no_agent(shell: Shell) -> None:
    assert "--list" in shell.metal(code=2).stderr


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_written_for_good(shell: Shell, name: str) -> None:
    def write(*more: str) -> str:
        return shell.metal(name, "--write", "--url", shell.url, "--api-key", KEY, *more).stderr

    file = shell.home / SETTINGS[name]
    assert f"wrote `{file}`" in write()
    first = file.read_text()
    for each in (shell.url, MODEL, KEY):
        assert each in first
    assert file.stat().st_mode & 0o077 == 0
    assert "says so already" in write()
    assert shell.files() == {SETTINGS[name]}
    # Another server, another model.
    with serving() as other:
        shell.url = other.url
        write()
        assert other.url in file.read_text()
    backup = file.with_name(f"{file.name}.backup")
    assert backup.read_text() == first
    second = file.read_text()
    file.write_text(first)
    with serving() as other:
        shell.url = other.url
        write()
    assert second != first == file.with_name(f"{file.name}.backup-2").read_text()
    assert backup.read_text() == first


@pytest.mark.parametrize("content", [b"{ // mine\n}", b"\xff", b"[1]"])
def test_settings_that_cannot_be_read_stay(shell: Shell, content: bytes) -> None:
    file = shell.home / SETTINGS["pi"]
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    done = shell.metal("pi", "--write", "--url", shell.url, code=1)
    assert done.stderr.startswith(f"error: cannot change `{file}`: ")
    assert "hint: change it by hand" in done.stderr
    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]
