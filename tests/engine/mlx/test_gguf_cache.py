from __future__ import annotations

import os
import resource
import shutil
import sys
from types import SimpleNamespace

import gguf_writer
import mlx.core as mx
import numpy as np
import pytest

from vllm_metal import paths
from vllm_metal.engine.mlx import gguf_cache
from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.hub import conversions

WEIGHTS = {
    "layer.weight": mx.arange(12, dtype=mx.uint32).reshape(3, 4),
    "layer.scales": mx.ones(3, mx.float16),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def requantized_gguf(tmp_path) -> GGUFFile:
    return write(tmp_path, "Q6_K")


def write(folder, type_name: str, seed: int = 0) -> GGUFFile:
    values = np.random.default_rng(seed).normal(size=(2, 256)).astype(np.float32)
    return GGUFFile(gguf_writer.write(folder / "m.gguf", {}, {"t": (type_name, values)}))


def kept_files() -> list[str]:
    return [path.name for path in paths.conversions_dir().glob("*")]


def test_weights_come_back_as_they_were(requantized_gguf):
    assert gguf_cache.load(requantized_gguf) is None
    gguf_cache.store(requantized_gguf, WEIGHTS)
    loaded = gguf_cache.load(requantized_gguf)
    assert loaded.keys() == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        assert loaded[name].dtype == array.dtype
        assert mx.array_equal(loaded[name], array).item()
    assert kept_files() == [conversions.file_for(requantized_gguf.path).name]


@pytest.mark.skipif(sys.platform == "darwin", reason="its names are UTF-8")
def test_a_file_may_have_any_name(tmp_path):
    folder = tmp_path / os.fsdecode(b'\xff "\\')
    folder.mkdir()
    file = write(folder, "Q6_K")
    gguf_cache.store(file, WEIGHTS)
    conversions.sweep()
    assert gguf_cache.load(file) is not None


def test_what_needs_no_quantizing_takes_no_disk(tmp_path):
    file = write(tmp_path, "Q4_K")
    gguf_cache.store(file, WEIGHTS)
    assert kept_files() == []
    assert gguf_cache.load(file) is None


def test_another_file_in_its_place_is_converted_again(tmp_path, requantized_gguf):
    gguf_cache.store(requantized_gguf, WEIGHTS)
    changed = write(tmp_path, "Q6_K", seed=1)
    os.utime(changed.path, ns=(1, 1))
    assert gguf_cache.load(changed) is None
    gguf_cache.store(changed, WEIGHTS)
    assert gguf_cache.load(changed) is not None
    assert len(kept_files()) == 1


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-3], lambda data: b"\xff" * len(data)]
)
def test_a_damaged_conversion_is_made_again(requantized_gguf, damage, caplog):
    gguf_cache.store(requantized_gguf, WEIGHTS)
    kept = conversions.file_for(requantized_gguf.path)
    kept.write_bytes(damage(kept.read_bytes()))
    assert gguf_cache.load(requantized_gguf) is None
    assert "converted again" in caplog.text


def test_a_full_disk_means_no_conversion_is_kept(requantized_gguf, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=40))
    gguf_cache.store(requantized_gguf, WEIGHTS)
    assert kept_files() == []
    assert "too full" in caplog.text


def test_a_write_that_fails_leaves_nothing(requantized_gguf, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        gguf_cache.store(requantized_gguf, WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept_files() == []
    assert "cannot be kept" in caplog.text


def test_a_place_that_cannot_be_written_means_no_conversion_is_kept(tmp_path, requantized_gguf, caplog):
    (tmp_path / "cache").write_text("a file where the folder would be")
    gguf_cache.store(requantized_gguf, WEIGHTS)
    assert gguf_cache.load(requantized_gguf) is None
    assert "cannot be kept" in caplog.text
