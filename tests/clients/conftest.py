"""Clients, each installed the first time that a test wants it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import client_packages
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))


@pytest.fixture(scope="session")
def python_of(cache_dir: Path) -> Callable[[str], Path]:
    """From the name of a client to the interpreter that can import it."""
    return lambda name: client_packages.python(name, cache_dir)


@pytest.fixture(scope="session")
def javascript(cache_dir: Path) -> tuple[Path, Path]:
    """Node, and the folder from where it finds the clients."""
    return client_packages.javascript(cache_dir)


@pytest.fixture(scope="session")
def hub_cache(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An `HF_HOME` with SmolLM2's tokenizer, for clients that count tokens themselves."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    export = [sys.executable, str(ROOT / "bench" / "export_smollm2.py"), "--tokenizer-only"]
    subprocess.run([*export, str(smollm2_path), str(snapshot)], check=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    return home
