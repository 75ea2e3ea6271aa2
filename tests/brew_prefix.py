"""A Homebrew prefix in which a tap's formula is installed by a stub of brew."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
STUB = ROOT / "tests" / "formula" / "brew_stub"

_GIT = ["git", "-c", "user.name=Tap", "-c", "user.email=tap@localhost", "-c", "init.defaultBranch=main"]


def require(program: str) -> str:
    """Where `program` is. CI installs Ruby and rubocop, so there it may not be missing."""
    found = shutil.which(program)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"`{program}` is missing; `make ruby` installs it")
        pytest.skip(f"there is no `{program}` here; on Debian `make ruby` installs it")
    return found


class BrewPrefix:
    """`tap` is a clone of this checkout as it is now; `metal` is what a service would run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tap = path / "Library" / "Taps" / "local" / "homebrew-metal"
        self.bin = path / "bin"
        self.opt = path / "opt" / "vllm-metal"
        self.metal = self.opt / "bin" / "metal"
        for folder in ("Formula", "src"):
            shutil.copytree(
                ROOT / folder,
                self.tap / folder,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        self._git("init", "--quiet")
        self.commit()
        python = path / "opt" / "python@3.12" / "bin" / "python3.12"
        python.parent.mkdir(parents=True)
        # Not that of the development venv: it has packages.
        python.symlink_to(Path(sys.executable).resolve())

    def commit(self) -> None:
        """Make the tap's next HEAD of its files."""
        self._git("add", "--all")
        self._git("commit", "--quiet", "--message", "tap")

    def install(self) -> Path:
        """The keg of the tap's HEAD, linked into `opt` as brew's install and upgrade do."""
        ((url, options),) = self.describe()["head"]
        assert options["using"] == "git"
        source = self.path / "build"
        shutil.rmtree(source, ignore_errors=True)
        self._git("clone", "--quiet", "--branch", options["branch"], url, str(source))
        version = "HEAD-" + self._git("rev-parse", "--short=7", "HEAD").strip()
        self._stub("install", version, cwd=source)
        keg = self.path / "Cellar" / "vllm-metal" / version
        self.bin.mkdir(exist_ok=True)
        for link, target in ((self.opt, keg), (self.bin / "metal", keg / "bin" / "metal")):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        return keg

    def uninstall(self) -> None:
        """Remove the keg and its links, and nothing else."""
        self.opt.unlink()
        (self.bin / "metal").unlink()
        shutil.rmtree(self.path / "Cellar")

    def describe(self) -> dict[str, Any]:
        """What the formula says."""
        return json.loads(self._stub("describe", "HEAD", cwd=self.path))

    def test(self) -> None:
        """Run the formula's `test do`. Raises CalledProcessError if it fails."""
        folder = self.path / "test"
        folder.mkdir()
        self._stub("test", self.opt.resolve().name, cwd=folder)

    def _stub(self, step: str, version: str, *, cwd: Path) -> str:
        formula = self.tap / "Formula" / "vllm-metal.rb"
        command = [require("ruby"), str(STUB), str(formula), str(self.path), version, step]
        return self._run(command, cwd)

    def _git(self, *arguments: str) -> str:
        return self._run([*_GIT, *arguments], self.tap)

    @staticmethod
    def _run(command: list[str], cwd: Path) -> str:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        return done.stdout
