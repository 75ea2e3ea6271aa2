"""Pulls from a hub on loopback, with the hub's own client in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fake_hub import TOKEN, FakeHub, Repository

# The client reads its environment at import, hence a process for each pull.
PULL = """
import json, shutil, signal, sys
from dataclasses import asdict
from pathlib import Path

from vllm_metal.errors import DownloadError, MetalError
from vllm_metal.hub import names, pull

source, models_dir, *options = sys.argv[1:]
options = dict(option.split("=") for option in options)
events = []

def on_progress(progress):
    events.append(asdict(progress))
    if "fail_after" in options and progress.done_bytes > int(options["fail_after"]):
        raise OSError("the reader has gone")

def interrupt(*_):
    print("interrupted", flush=True)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
if "free" in options:
    usage = shutil.disk_usage("/")._replace(free=int(options["free"]))
    shutil.disk_usage = lambda _: usage
try:
    model = pull.pull(names.parse_source(source), models_dir=Path(models_dir), on_progress=on_progress)
    answer = {"name": model.name, "path": str(model.path)}
except (MetalError, OSError, KeyboardInterrupt) as exc:
    answer = {
        "error": type(exc).__name__,
        "message": str(exc),
        "hint": getattr(exc, "hint", None),
        "retryable": getattr(exc, "retryable", None),
    }
print(json.dumps({**answer, "events": events}))
"""

CONFIG = b'{"model_type": "llama"}'
MODEL = {
    "config.json": CONFIG,
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
}
OTHERS = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickle",
    "model.gguf": b"GGUF",
    "consolidated.safetensors": b"weights again",
    "preview.png": b"image",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "original/model.safetensors": b"weights once more",
}


class Machine:
    """Its own hub cache and model folder, and `pull` as a process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cache = home / "huggingface" / "hub"

    def start(self, source: str, endpoint: str, *options: str, **env: str) -> subprocess.Popen[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environ |= {"HF_HOME": str(self.home / "huggingface"), "HF_ENDPOINT": endpoint, **env}
        command = [sys.executable, "-c", PULL, source, str(self.home / "models"), *options]
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def pull(self, source: str, endpoint: str, *options: str, **env: str) -> Mapping[str, Any]:
        stdout, stderr = self.start(source, endpoint, *options, **env).communicate(timeout=60)
        assert stderr == ""
        answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return answer

    def files(self, name: str) -> dict[str, bytes]:
        (snapshot,) = (self.cache / f"models--{name.replace('/', '--')}" / "snapshots").iterdir()
        return {str(path.relative_to(snapshot)): path.read_bytes() for path in snapshot.rglob("*.*")}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def hub() -> FakeHub:
    hub = FakeHub()
    hub.repositories["org/model"] = Repository({**MODEL, **OTHERS})
    return hub


@pytest.fixture
def endpoint(hub: FakeHub) -> Iterator[str]:
    with hub.serving() as url:
        yield url


def test_fetches_the_files_of_a_text_model_into_the_shared_cache(
    machine: Machine, hub: FakeHub, endpoint: str
) -> None:
    model = machine.pull("org/model", endpoint)

    commit = hub.repositories["org/model"].commit
    snapshot = machine.cache / "models--org--model" / "snapshots" / commit
    assert (model["name"], model["path"]) == ("org/model", str(snapshot))
    assert machine.files("org/model") == MODEL
    assert hub.fetched() == set(MODEL)
    assert all("org/model" in request.path for request in hub.requests)  # no telemetry


def test_progress_counts_up_to_the_bytes_of_all_files(machine: Machine, endpoint: str) -> None:
    events = machine.pull("org/model", endpoint)["events"]

    total = sum(map(len, MODEL.values()))
    assert events[0] == {"stage": "looking up `org/model`", "done_bytes": 0, "total_bytes": 0}
    done = [event["done_bytes"] for event in events[1:]]
    assert done == sorted(done)
    assert done[-1] == total
    assert {event["total_bytes"] for event in events[1:]} == {total}


def test_second_pull_is_offline(machine: Machine, hub: FakeHub) -> None:
    with hub.serving() as endpoint:
        first = machine.pull("org/model", endpoint)
        asked = len(hub.requests)
        assert machine.pull("org/model", endpoint)["path"] == first["path"]
        assert len(hub.requests) == asked
    again = machine.pull("org/model", endpoint)
    assert again["path"] == first["path"]
    assert again["events"] == []
    assert machine.pull("org/model", endpoint, HF_HUB_OFFLINE="1")["path"] == first["path"]


def test_revision_may_be_a_branch_or_a_commit(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    repository = hub.repositories["org/model"]
    repository.branches = ("main", "refs/pr/1")
    by_branch = machine.pull("org/model@refs/pr/1", endpoint)
    assert by_branch["name"] == "org/model"
    assert machine.pull(f"org/model@{repository.commit}", endpoint)["path"] == by_branch["path"]


def test_sharded_weights_are_fetched_whole(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"%d" % n * 100 for n in (1, 2)}
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "extra.safetensors"}})
    files = {"config.json": CONFIG, "model.safetensors.index.json": index.encode(), **shards}
    hub.repositories["org/sharded"] = Repository({**files, "extra.safetensors": b"x"})
    machine.pull("org/sharded", endpoint)
    assert machine.files("org/sharded") == {**files, "extra.safetensors": b"x"}


def test_unknown_repository(machine: Machine, endpoint: str) -> None:
    answer = machine.pull("org/modle", endpoint)
    assert answer["error"] == "ModelNotFound"
    assert answer["message"] == "`org/modle` is not on the model hub, or is private"
    assert "HF_TOKEN" in answer["hint"]


def test_unknown_revision(machine: Machine, endpoint: str) -> None:
    answer = machine.pull("org/model@v9", endpoint)
    assert answer["error"] == "ModelNotFound"
    assert answer["message"] == "`org/model` has no revision `v9`"
    assert f"{endpoint}/org/model" in answer["hint"]


def test_gated_repository_needs_a_token(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/gated"] = Repository(MODEL, gated=True)
    answer = machine.pull("org/gated", endpoint)
    assert answer["error"] == "DownloadError"
    assert answer["message"] == "`org/gated` is given only to users who accepted its licence"
    assert (
        answer["hint"] == f"accept it at {endpoint}/org/gated, then set `HF_TOKEN` to a token of that account"
    )
    assert not answer["retryable"]

    assert machine.pull("org/gated", endpoint, HF_TOKEN=TOKEN)["name"] == "org/gated"


def test_wrong_token(machine: Machine, endpoint: str) -> None:
    answer = machine.pull("org/model", endpoint, HF_TOKEN="hf_wrong")
    assert answer["error"] == "DownloadError"
    assert answer["message"] == "the model hub refuses access to `org/model` (HTTP 401)"
    assert "`HF_TOKEN`" in answer["hint"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("config.json", "m.gguf"), "holds GGUF files but no `model*.safetensors`"),
        (
            ("config.json", "pytorch_model.bin"),
            "holds PyTorch weights (`.bin`, `.pth`) but no `model*.safetensors`",
        ),
        (("config.json",), "holds no `model*.safetensors`"),
        (("model.safetensors",), "has no `config.json`"),
        (("adapter_config.json", "adapter_model.safetensors"), "is a LoRA adapter, not a model"),
    ],
)
def test_repository_without_a_model(
    machine: Machine, hub: FakeHub, endpoint: str, files: tuple[str, ...], message: str
) -> None:
    hub.repositories["org/other"] = Repository(dict.fromkeys(files, b"{}"))
    answer = machine.pull("org/other", endpoint)
    assert answer["error"] == "UnsupportedModel"
    assert answer["message"] == f"`org/other` {message}"
    assert answer["hint"]
    assert hub.fetched() == set()


def test_hub_that_is_down(machine: Machine, hub: FakeHub) -> None:
    with hub.serving() as endpoint:
        pass
    answer = machine.pull("org/model", endpoint)
    assert answer["error"] == "DownloadError"
    assert answer["message"].startswith("the model hub can't be reached")
    assert "`metal serve smollm2`" in answer["hint"]
    assert "`metal chat --local smollm2`" in answer["hint"]
    assert answer["retryable"]


def test_hub_that_fails(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.status = 503
    answer = machine.pull("org/model", endpoint)
    assert (answer["error"], answer["retryable"]) == ("DownloadError", True)
    assert answer["message"] == "the model hub answered HTTP 503 for `org/model`"


def test_endpoint_that_is_no_hub(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.status = 200
    answer = machine.pull("org/model", endpoint)
    assert (answer["error"], answer["retryable"]) == ("DownloadError", True)
    assert answer["message"] == f"`{endpoint}` does not answer as a model hub"
    assert "`HF_ENDPOINT`" in answer["hint"]


def test_offline_and_not_on_disk(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    answer = machine.pull("org/model", endpoint, HF_HUB_OFFLINE="1")
    assert answer["error"] == "DownloadError"
    assert answer["message"] == "`org/model` is not on disk, and `HF_HUB_OFFLINE` forbids fetching it"
    assert hub.requests == []


def test_too_little_disk_is_told_before_the_first_byte(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    answer = machine.pull("org/model", endpoint, "free=1500")
    assert answer["error"] == "DownloadError"
    assert answer["message"].startswith("not enough disk space: 7.1 kB needed, 1.5 kB free")
    assert hub.fetched() == set()


def test_killed_pull_runs_again_and_keeps_whole_files(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/model"].hold_after["model.safetensors"] = 3000
    with machine.start("org/model", endpoint) as process:
        assert hub.held.wait(timeout=60)
        process.kill()
    hub.released.set()

    answer = machine.pull("org/model", endpoint, HF_HUB_OFFLINE="1")
    assert answer["error"] == "DownloadError"  # part of a snapshot is no model
    answer = machine.pull("org/model", endpoint)
    assert machine.files("org/model") == MODEL
    assert answer["events"][-1]["done_bytes"] >= len(MODEL["model.safetensors"])


# The client hands on bytes in chunks of this size.
CHUNK = 10 * 1024 * 1024
LARGE = {"config.json": CONFIG, "model.safetensors": bytes(3 * CHUNK)}


def test_cut_connection_is_resumed(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/large"] = Repository(LARGE, cut_after={"model.safetensors": CHUNK + CHUNK // 2})
    answer = machine.pull("org/large", endpoint)
    assert machine.files("org/large") == LARGE
    ranges = [request.byte_range for request in hub.requests if request.byte_range]
    assert ranges == [f"bytes={CHUNK}-"]
    assert answer["events"][-1]["done_bytes"] == answer["events"][-1]["total_bytes"]


def test_error_of_the_callback_ends_the_pull(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/large"] = Repository(LARGE)
    answer = machine.pull("org/large", endpoint, f"fail_after={CHUNK // 2}")
    assert (answer["error"], answer["message"]) == ("OSError", "the reader has gone")
    assert not list(machine.cache.rglob("*.incomplete"))
    assert "model.safetensors" not in machine.files("org/large")


def test_interrupt_ends_the_pull(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/large"] = Repository(LARGE, hold_after={"model.safetensors": CHUNK})
    with machine.start("org/large", endpoint) as process:
        assert process.stdout is not None
        assert hub.held.wait(timeout=60)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        hub.released.set()
        assert json.loads(process.stdout.read())["error"] == "KeyboardInterrupt"
    assert not list(machine.cache.rglob("*.incomplete"))
    assert "model.safetensors" not in machine.files("org/large")
