"""Pulls from a hub on loopback, with the hub's own client in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_hub import TOKEN, FakeHub, Repository
from pulling_machine import Machine

CONFIG = b'{"model_type": "llama"}'
MODEL = {
    "config.json": CONFIG,
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "2_Dense/model.safetensors": b"a layer behind the pooling",
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
    "4bit/model.safetensors": b"weights in fewer bits",
}


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
    assert events[0] == {"stage": "looking up `org/model`", "done_bytes": 0, "total_bytes": 0, "files": []}
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
    assert hub.fetched() == {"config.json"}
    assert not machine.cache.exists()


GGUFS = {"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8" * 2, "mmproj-F16.gguf": b"GGUF", "README.md": b"#"}


def test_one_quantization_of_several_is_fetched(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/gguf"] = Repository(GGUFS)
    answer = machine.pull("org/gguf", endpoint)
    assert answer["error"] == "ModelNotFound"
    assert answer["message"] == "`org/gguf` holds 2 quantizations: `Q4_0` (5 B), `Q8_0` (10 B)"
    assert hub.fetched() == set()

    model = machine.pull("org/gguf:q8_0", endpoint)
    assert model["name"] == "org/gguf:q8_0"
    assert Path(model["path"]).read_bytes() == GGUFS["m-Q8_0.gguf"]
    assert machine.files("org/gguf").keys() == {"m-Q8_0.gguf"}
    # Of those on disk there is no choice to make.
    again = machine.pull("org/gguf", endpoint, HF_HUB_OFFLINE="1")
    assert again["path"] == model["path"]

    machine.pull("org/gguf@main:Q4_0", endpoint)
    assert machine.pull("org/gguf", endpoint)["error"] == "ModelNotFound"


def test_parts_of_a_gguf_file_are_fetched_together(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    parts = {f"Q8_0/m-0000{n}-of-00002.gguf": b"GGUF%d" % n for n in (1, 2)}
    hub.repositories["org/parts"] = Repository(parts)
    assert machine.pull("org/parts", endpoint)["path"].endswith("/Q8_0/m-00001-of-00002.gguf")
    assert machine.files("org/parts") == parts


def test_safetensors_go_before_gguf_unless_a_quantization_is_named(
    machine: Machine, hub: FakeHub, endpoint: str
) -> None:
    hub.repositories["org/both"] = Repository({**MODEL, "m-Q4_0.gguf": b"GGUF"})
    assert Path(machine.pull("org/both", endpoint)["path"]).is_dir()
    assert machine.pull("org/both:Q4_0", endpoint)["path"].endswith("/m-Q4_0.gguf")
    assert Path(machine.pull("org/both", endpoint)["path"]).is_dir()


def test_quantization_of_a_repository_without_gguf_files(machine: Machine, endpoint: str) -> None:
    answer = machine.pull("org/model@main:Q4_0", endpoint)
    assert answer["error"] == "ModelNotFound"
    assert answer["message"] == "`org/model` has no quantization `Q4_0`: `model` (4 B)"
