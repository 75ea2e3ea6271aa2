"""From `brew install` to nothing left: what a user does in a year, in one run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

import tiny_folder
from brew_prefix import BrewPrefix
from vllm_metal import __version__

NEXT_VERSION = "99.0.0"

# Takes no index: all packages are there in the development venv, in other versions perhaps.
UV = """#!/bin/sh
test "$1 $3" = "pip --python" || exit 2
cd "$(dirname "$4")"/../lib/python*/site-packages || exit 1
test "$2" = check || echo '{site_packages}' > packages.pth
"""


@pytest.fixture
def brew(tmp_path, monkeypatch) -> BrewPrefix:
    brew = BrewPrefix(tmp_path / "homebrew")
    brew.bin.mkdir()
    uv = brew.bin / "uv"
    uv.write_text(UV.format(site_packages=sysconfig.get_path("purelib")))
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{brew.bin}:/usr/bin:/bin")
    return brew


def _files(home: Path) -> set[Path]:
    return {path for path in home.rglob("*") if path.is_symlink() or not path.is_dir()}


def _paths(text: str) -> list[Path]:
    return [Path(found) for found in re.findall(r"^  (/\S+)", text, re.MULTILINE)]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_from_install_to_uninstall(brew, user, tmp_path):
    user.metal = brew.bin / "metal"
    user.config(model=tiny_folder.save(tmp_path / "model"))
    mine = _files(user.home)
    venv = user.home / ".venv-vllm-metal"

    brew.install()
    assert _files(user.home) == mine

    # The first serve makes the venv.
    with subprocess.Popen([user.metal, "serve"], env=user.env, stderr=subprocess.DEVNULL) as served:
        try:
            user.status_when(lambda status: status["health"] == "ok")
            served.terminate()
            assert served.wait() == 0
        finally:
            served.kill()
    first = venv.resolve(strict=True)

    # From here on launchd serves.
    user.does("install")
    status = user.status_when(lambda status: status["healthy"])
    assert status["managed_by"] == "metal"
    assert status["version_running"] == __version__
    assert not status["restart_needed"]

    # A crash is made up for.
    pid = status["pid"]
    os.kill(pid, signal.SIGKILL)
    status = user.status_when(lambda status: status["healthy"] and status["pid"] != pid)

    # An upgrade is noticed, and waits for a restart.
    init = brew.tap / "src" / "vllm_metal" / "__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{NEXT_VERSION}"', init.read_text()))
    brew.commit()
    brew.install()
    pid = status["pid"]
    status = user.status_when(lambda status: status["restart_needed"])
    assert (status["pid"], status["version_running"]) == (pid, __version__)
    assert venv.resolve(strict=True) == first
    user.does("restart")
    status = user.status_when(lambda status: status["healthy"])
    assert status["version_running"] == NEXT_VERSION
    assert not status["restart_needed"]
    assert venv.resolve(strict=True) != first
    assert not first.exists()

    # Nothing stays but what is said to.
    brew_log = brew.path / "var" / "log" / "vllm-metal.log"
    brew_log.parent.mkdir(parents=True)
    brew_log.touch()
    state = sorted(user.state.iterdir())
    command = [user.metal, "uninstall", "--yes"]
    done = subprocess.run(command, env=user.env, capture_output=True, text=True, check=True)
    brew.uninstall()
    assert not user.launchd.jobs()
    assert not brew_log.exists()
    assert _files(user.home) == mine == {user.config_file}
    removed, _, left = done.stderr.partition("to be left:\n")
    assert _paths(removed) == [venv, *state, brew_log]
    assert _paths(left) == [user.config_file]
