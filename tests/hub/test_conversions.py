from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from vllm_metal import paths
from vllm_metal.hub import conversions, removal
from vllm_metal.hub.installed import InstalledModel
from vllm_metal.hub.model_kind import ModelKind


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    paths.conversions_dir().mkdir(parents=True)


def source(path, content=b"weights"):
    path.write_bytes(content)
    return path


def convert(path):
    """As a safetensors file without tensors."""
    header = json.dumps({"__metadata__": conversions.description([path])}).encode()
    kept = conversions.file_for(path)
    kept.write_bytes(len(header).to_bytes(8, "little") + header)
    return kept


def test_models_of_one_name_are_kept_apart(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    files = {conversions.file_for(tmp_path / name / "m.gguf") for name in ("one", "two")}
    assert len(files) == 2
    assert {file.parent for file in files} == {paths.conversions_dir()}


def test_any_change_of_a_file_changes_its_description(tmp_path):
    parts = [source(tmp_path / "m-1.gguf"), source(tmp_path / "m-2.gguf")]
    before = conversions.description(parts)
    assert conversions.description(parts) == before
    parts[1].write_bytes(b"weightz")
    os.utime(parts[1], ns=(1, 1))
    changed = conversions.description(parts)
    assert changed != before
    parts[1].write_bytes(b"more weights")
    os.utime(parts[1], ns=(1, 1))
    assert conversions.description(parts) not in (before, changed)


def test_another_file_of_one_size_and_time_changes_the_description(tmp_path):
    path, other = source(tmp_path / "m.gguf"), source(tmp_path / "other.gguf", b"weightz")
    for file in (path, other):
        os.utime(file, ns=(1, 1))
    before = conversions.description([path])
    other.replace(path)
    assert conversions.description([path]) != before


def test_a_model_is_forgotten(tmp_path):
    path = source(tmp_path / "m.gguf")
    kept = convert(path)
    conversions.forget(path)
    conversions.forget(path)
    assert not kept.exists()


def test_a_removed_model_is_forgotten(tmp_path):
    models_dir = tmp_path / "models"
    models_dir.mkdir()
    path = source(models_dir / "m.gguf")
    kept = convert(path)
    model = InstalledModel(
        name="m",
        path=path,
        files=(path,),
        origin="models.dir",
        kind=ModelKind.GENERATE,
        size_bytes=7,
        number_format=None,
        context_length=None,
        last_used=None,
    )
    removal.remove(model, models_dir)
    assert not path.exists()
    assert not kept.exists()


def test_a_sweep_leaves_what_has_a_source(tmp_path):
    kept, orphan = convert(source(tmp_path / "kept.gguf")), convert(source(tmp_path / "gone.gguf"))
    (tmp_path / "gone.gguf").unlink()
    damaged = [conversions.file_for(tmp_path / name) for name in ("empty.gguf", "wild.gguf", "deep.gguf")]
    damaged[0].write_bytes(b"")
    damaged[1].write_bytes(b"\xff" * 40)
    damaged[2].write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    conversions.sweep()
    assert kept.exists()
    assert not any(file.exists() for file in (orphan, *damaged))


def test_a_sweep_takes_what_killed_processes_left(tmp_path):
    own = conversions.partial_file_for(tmp_path / "m.gguf")
    own.write_bytes(b"half")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = own.with_name(own.name.replace(str(os.getpid()), str(gone.pid)))
    left.write_bytes(b"half")
    conversions.sweep()
    assert own.exists()
    assert not left.exists()


def test_a_folder_that_is_not_there_needs_no_sweep():
    paths.conversions_dir().rmdir()
    conversions.sweep()
    assert not paths.conversions_dir().exists()
