"""Chat templates and tokenizers of real models, from packages that ship them, fetched once."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tokenizer_packages

_TEMPLATES = "llama-cpp-python==0.3.36"


@pytest.fixture(scope="session")
def chat_templates(cache_dir: Path) -> Path:
    """A folder of Jinja files."""
    folder = cache_dir / "chat-templates" / _TEMPLATES.partition("==")[2]
    if not folder.exists():
        with tempfile.TemporaryDirectory() as download:
            pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest", download]
            done = tokenizer_packages.run([*pip, "--no-binary", _TEMPLATES.partition("==")[0], _TEMPLATES])
            assert done.returncode == 0, done.stderr
            [archive] = Path(download).glob("*.tar.gz")
            tokenizer_packages.extract(
                archive, lambda path: path.match("vendor/llama.cpp/models/templates/*.jinja"), folder
            )
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(cache_dir: Path) -> Callable[[str], Path]:
    """From the name of a family to its tokenizer's files; skips the test where npm cannot fetch them."""
    return lambda family: tokenizer_packages.tokenizer(family, cache_dir)


@pytest.fixture(scope="session")
def real_tokenizer(tokenizer_folder: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """From the name of a family to its tokenizer."""
    return lambda family: Tokenizer.from_file(str(tokenizer_folder(family) / "tokenizer.json"))
