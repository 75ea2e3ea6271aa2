"""Pulls from a ModelScope on loopback, which answers as its API is known to."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from pulling_machine import Machine

CONFIG = b'{"model_type": "llama"}'
MODEL = {"config.json": CONFIG, "model.safetensors": b"weights" * 1000, "tokenizer.json": b"{}"}
OTHERS = {"README.md": b"#", "onnx/config.json": b"{}"}


class FakeModelScope:
    def __init__(self) -> None:
        self.files = {"org/model": {**MODEL, **OTHERS}}
        self.listing: bytes | None = None  # in place of the real one
        self.fetched: list[tuple[str, str | None]] = []

    def list(self, repo: str) -> bytes:
        entries: list[dict[str, object]] = [{"Name": "onnx", "Path": "onnx", "Type": "tree", "Size": 0}]
        for path, body in self.files[repo].items():
            sha256 = hashlib.sha256(body).hexdigest()
            entries.append({"Path": path, "Type": "blob", "Size": len(body), "Sha256": sha256})
        return json.dumps({"Code": 200, "Data": {"Files": entries}}).encode()


@pytest.fixture
def modelscope() -> FakeModelScope:
    return FakeModelScope()


@pytest.fixture
def env(modelscope: FakeModelScope) -> Iterator[dict[str, str]]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked = {key: values[0] for key, values in parse_qs(url.query).items()}
            found = re.fullmatch(r"/api/v1/models/(\w+/\w+)/(repo|repo/files)", url.path)
            status, body, start = 404, b"{}", 0
            if found and found[1] in modelscope.files and asked["Revision"] in ("master", "v1"):
                if found[2] == "repo/files":
                    assert asked["Recursive"] == "true"
                    status, body = 200, modelscope.listing or modelscope.list(found[1])
                else:
                    byte_range = self.headers.get("Range")
                    modelscope.fetched.append((asked["FilePath"], byte_range))
                    body = modelscope.files[found[1]][asked["FilePath"]]
                    start = int(re.findall(r"\d+", byte_range)[0]) if byte_range else 0
                    status = 206 if byte_range else 200
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield {
        "VLLM_USE_MODELSCOPE": "True",
        "MODELSCOPE_DOMAIN": f"http://127.0.0.1:{server.server_port}",
    }
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


NO_HUB = "http://127.0.0.1:9"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_fetched_into_our_own_folder_and_found_again(
    machine: Machine, modelscope: FakeModelScope, env: dict[str, str]
) -> None:
    model = machine.pull("org/model", NO_HUB, **env)
    folder = machine.home / "models" / "modelscope" / "org" / "model"
    assert (model["name"], model["path"]) == ("org/model", str(folder))
    assert contents(folder) == MODEL
    assert model["events"][-1]["done_bytes"] == model["events"][-1]["total_bytes"]

    num_fetched = len(modelscope.fetched)
    assert machine.pull("org/model", NO_HUB, **env, HF_HUB_OFFLINE="1")["path"] == str(folder)
    assert len(modelscope.fetched) == num_fetched
    assert machine.pull("org/model@v1", NO_HUB, **env)["path"] == f"{folder}@v1"


def test_a_rest_is_taken_up_and_is_no_model_before(
    machine: Machine, modelscope: FakeModelScope, env: dict[str, str]
) -> None:
    folder = machine.home / "models" / "modelscope" / "org" / "model"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "model.safetensors.incomplete").write_bytes(MODEL["model.safetensors"][:1000])
    machine.pull("org/model", NO_HUB, **env)
    assert contents(folder) == MODEL
    assert ("model.safetensors", "bytes=1000-6999") in modelscope.fetched
    assert modelscope.fetched[-1] == ("config.json", f"bytes=0-{len(CONFIG) - 1}")


def test_one_gguf_file_of_several(machine: Machine, modelscope: FakeModelScope, env: dict[str, str]) -> None:
    modelscope.files["org/gguf"] = {"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8"}
    assert "`Q4_0` (5 B), `Q8_0` (5 B)" in machine.pull("org/gguf", NO_HUB, **env)["message"]
    assert machine.pull("org/gguf:Q8_0", NO_HUB, **env)["path"].endswith("/org/gguf/m-Q8_0.gguf")


@pytest.mark.parametrize("source", ["org/gone", "org/model@v9"])
def test_what_is_not_there(machine: Machine, env: dict[str, str], source: str) -> None:
    answer = machine.pull(source, NO_HUB, **env)
    assert answer["error"] == "ModelNotFound"
    assert answer["message"] == f"`{source}` is not on ModelScope, or is not public"


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        (b"<html>", "ModelScope's answer for `org/model` is not JSON"),
        (b"[]", "ModelScope's answer for `org/model` is not JSON"),
        (b'{"Data": null}', "ModelScope's list of files is not as it was known to be"),
        (b'{"Data": {"Files": [{"Type": "blob"}]}}', "ModelScope's list of files is not as"),
    ],
)
def test_an_answer_that_is_another_than_known(
    machine: Machine, modelscope: FakeModelScope, env: dict[str, str], listing: bytes, message: str
) -> None:
    modelscope.listing = listing
    answer = machine.pull("org/model", NO_HUB, **env)
    assert answer["error"] == "DownloadError"
    assert answer["message"].startswith(message)


def test_it_is_down(machine: Machine) -> None:
    answer = machine.pull("org/model", NO_HUB, VLLM_USE_MODELSCOPE="1", MODELSCOPE_DOMAIN=NO_HUB)
    assert answer["retryable"]
    assert answer["message"].startswith("ModelScope can't be reached")
