"""Folders that are quantized, and what a conversion that does not end leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tiny_folder
from vllm_metal.engine.mlx import convert as conversion
from vllm_metal.engine.mlx import loader
from vllm_metal.errors import ModelError, NotAModel, UnsupportedModel
from vllm_metal.hub.progress import PullProgress

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_folder.save(tmp_path / "tiny", temperature=0.5)


def ignore(_: PullProgress) -> None:
    pass


def convert(source: Path, folder: Path, **options: Any) -> None:
    conversion.convert(
        source, folder, **{"bits": 4, "group_size": 32, "dtype": "auto", "on_progress": ignore} | options
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_the_new_model_is_quantized_and_answers_much_as_the_old(
    source: Path, tmp_path: Path, bits: int
) -> None:
    convert(source, tmp_path / "new", bits=bits)
    old, new = loader.load(source), loader.load(tmp_path / "new", dtype="float32")
    assert new.quantization == f"{bits}-bit"
    assert new.eos_token_ids == old.eos_token_ids
    assert new.generation_defaults == {"temperature": 0.5}
    assert new.tokenizer.encode("ab") == old.tokenizer.encode("ab")
    prompt = mx.array([[1, 2, 3, 4]])
    before, after = old.model(prompt), new.model(prompt)
    similarity = (before * after).sum() / mx.sqrt((before**2).sum() * (after**2).sum())
    assert similarity.item() > (0.999 if bits == 8 else 0.9)


def test_type_of_what_is_not_quantized(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "new", dtype="float16")
    weights = mx.load(str(tmp_path / "new" / "model.safetensors"))
    assert weights["model.norm.weight"].dtype == mx.float16
    assert weights["model.layers.0.self_attn.q_proj.scales"].dtype == mx.float16


def test_progress_and_a_quiet_standard_output(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[PullProgress] = []
    convert(source, tmp_path / "new", on_progress=events.append)
    assert [event.stage for event in events][:2] == ["reading `tiny`", "quantizing `tiny` to 4 bits"]
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total_bytes > 0
    assert capsys.readouterr().out == ""


def test_only_plain_weights_are_quantized(source: Path, tmp_path: Path, smollm2_path: Path) -> None:
    convert(source, tmp_path / "new")
    with pytest.raises(UnsupportedModel, match="`new` is quantized already \\(4-bit\\)"):
        convert(tmp_path / "new", tmp_path / "again")
    with pytest.raises(UnsupportedModel, match="is not a folder of safetensors"):
        convert(smollm2_path, tmp_path / "again")
    with pytest.raises(UnsupportedModel, match="in groups of 128"):
        convert(source, tmp_path / "again", group_size=128)
    (source / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(NotAModel, match="is damaged"):
        convert(source, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "tiny"]


def test_what_exists_is_never_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "new").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match="exists already"):
        convert(source, tmp_path / "new")


def test_a_failure_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(conversion.mlx_lm_utils, "save_model", fail)
    with pytest.raises(OSError, match="no space"):
        convert(source, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_what_a_killed_conversion_left_is_cleared_away(source: Path, tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from vllm_metal.engine.mlx import convert

convert.mlx_lm_utils.save_model = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), bits=4, group_size=32, dtype="auto",
                on_progress=lambda _: None)
"""
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "new")]
    assert subprocess.run(command, check=False, timeout=120).returncode == -9
    (left,) = tmp_path.glob(".new.*.partial")
    assert json.loads((left / "config.json").read_text())["quantization"]["bits"] == 4
    of_one_that_runs = tmp_path / f".new.{os.getppid()}.partial"
    of_another = tmp_path / ".new.txt.partial"
    for path in (of_one_that_runs, of_another):
        path.mkdir()

    convert(source, tmp_path / "new")
    assert not left.exists()
    assert of_one_that_runs.exists()
    assert of_another.exists()
    assert loader.load(tmp_path / "new").quantization == "4-bit"
