"""What several test modules share: a home of its own for every test, the real model, a real server."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from server_process import METAL, ServerProcess

ROOT = Path(__file__).parent.parent

# How long an example takes says how busy the machine is. CI tries the same ones each time: what a new one
# finds is for whoever can look at it.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("any machine")

# A run in the background ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Variables of the caller that would change what the product does.
_FOREIGN = ("METAL_", "VLLM_", "HF_", "XDG_")


def pytest_collection_finish() -> None:
    """Engines collect garbage as they end: soon done, if not in all that packages and tests are made of."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Downloads that outlive a test run."""
    path = Path(os.environ.get("METAL_TEST_CACHE") or ROOT / ".cache")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Path]:
    """Every path of the product's leads to a folder of this run; pip's cache stays the user's."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(_FOREIGN):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def smollm2_path(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, fetched with `metal pull` the first time."""
    env = {**os.environ, "METAL_MODELS_DIR": str(cache_dir / "models")}
    pulled = subprocess.run([METAL, "pull", "smollm2"], env=env, capture_output=True, text=True, check=False)
    assert pulled.returncode == 0, pulled.stderr
    return Path(pulled.stdout.strip())


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it."""
    with ServerProcess(str(smollm2_path), "--served-model-name", "smollm2", env={}) as process:
        yield process.ready()
