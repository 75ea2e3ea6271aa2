from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_metal.errors import ModelNotFound, NotAModel, UnsupportedModel
from vllm_metal.hub.aliases import ALIASES
from vllm_metal.hub.names import AliasSource, PathSource
from vllm_metal.hub.store import LocalModel, alias_path, find, inspect

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
INDEX = json.dumps({"weight_map": {f"layer{n}": f"model-{n}-of-5.safetensors" for n in range(1, 6)}}).encode()


def folder(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, body in files.items():
        (path / name).write_bytes(body)
    return path


def test_folder_is_named_after_itself(tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny", {"config.json": b"{}", "model.safetensors": b"weights"})
    assert inspect(path) == LocalModel("tiny", path)
    assert find(PathSource(path), models_dir=tmp_path) == inspect(path)


def test_whole_file_may_lie_beside_an_index_of_parts(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights", "model.safetensors.index.json": INDEX}
    assert inspect(folder(tmp_path / "tiny", files)).name == "tiny"


def test_gguf_file_is_named_after_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "Tiny.Q4_1.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    assert inspect(path) == LocalModel("Tiny.Q4_1", path)


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ({}, "is empty", "config.json"),
        ({"model.safetensors": b"w"}, "is not a model folder: it has no `config.json`", "config.json"),
        ({"a.gguf": b"GGUF"}, "is not a model folder: it has no `config.json`", "a.gguf`"),
        ({"adapter_config.json": b"{}"}, "is not a model folder: it has no `config.json`", "LoRA adapter"),
        ({"config.json": b"{"}, "config.json` is not valid JSON", "again"),
        ({"config.json": b"\xff"}, "config.json` is not valid JSON", "again"),
        ({"config.json": b"[]"}, "config.json` is not a JSON object", "again"),
        ({"config.json": b"{}"}, "holds no `model*.safetensors`", "mlx_lm.convert"),
        (
            {"config.json": b"{}", "pytorch_model.bin": b"p"},
            "holds PyTorch weights (`.bin`, `.pth`) but no `model*.safetensors`",
            "mlx_lm.convert",
        ),
        (
            {"config.json": b"{}", "consolidated.safetensors": b"w"},
            "holds safetensors of another layout but no `model*.safetensors`",
            "mlx_lm.convert",
        ),
        ({"config.json": b"{}", "model.safetensors": POINTER}, "is a Git LFS pointer", "git lfs pull"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"{}"}, "has no `weight_map`", "again"),
        (
            {"config.json": b"{}", "model.safetensors.index.json": INDEX, "model-2-of-5.safetensors": b"w"},
            "lacks `model-1-of-5.safetensors` and 3 more",
            "again",
        ),
    ],
)
def test_folder_without_a_model(tmp_path: Path, files: dict[str, bytes], message: str, hint: str) -> None:
    with pytest.raises((NotAModel, UnsupportedModel), match=re.escape(message)) as caught:
        inspect(folder(tmp_path / "model", files))
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "body", "message", "hint"),
    [
        ("a.gguf", b"", "is empty", "again"),
        ("a.gguf", b"PK\x03\x04", "is not a GGUF file", "again"),
        ("a.gguf", POINTER, "is a Git LFS pointer", "git lfs pull"),
        ("model.safetensors", b"w", "is a file of weights, not a whole model", "give its folder"),
        ("notes.txt", b"hello", "is not a model", ".gguf"),
    ],
)
def test_file_without_a_model(tmp_path: Path, name: str, body: bytes, message: str, hint: str) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(NotAModel, match=re.escape(message)) as caught:
        inspect(tmp_path / name)
    assert hint in str(caught.value.hint)


def test_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        inspect(tmp_path / "gone")
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelNotFound, match="does not exist"):
        inspect(tmp_path / "dangling.gguf")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("locked", ["model", "model/config.json", "model/model.safetensors"])
def test_path_that_may_not_be_read(tmp_path: Path, locked: str) -> None:
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    path = folder(tmp_path / "model", {"config.json": b"{}", "model.safetensors": b"w"})
    (tmp_path / locked).chmod(0)
    with unprivileged(), pytest.raises(NotAModel, match=f"{locked}` cannot be read: permission denied"):
        inspect(path)
    (tmp_path / locked).chmod(0o755)


def test_alias_is_found_when_whole(tmp_path: Path) -> None:
    source = AliasSource("smollm2")
    assert find(source, models_dir=tmp_path) is None

    path = alias_path("smollm2", tmp_path)
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(ALIASES["smollm2"].file_bytes - 1)
    assert find(source, models_dir=tmp_path) is None

    with path.open("r+b") as file:
        file.truncate(ALIASES["smollm2"].file_bytes)
    assert find(source, models_dir=tmp_path) == LocalModel("smollm2", path)
