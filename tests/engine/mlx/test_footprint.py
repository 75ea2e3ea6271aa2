"""What headers tell of a model is what loading it takes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tiny_folder
from vllm_metal.engine.mlx import footprint, gpu_check, loader, model_description
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec
from vllm_metal.errors import ModelNotFound, UnsupportedModel
from vllm_metal.settings import ModelsConfig


def edit_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return edit_config(tiny_folder.save(tmp_path / "tiny"), dtype="float32")


def test_a_folder(folder: Path) -> None:
    told = footprint.main([str(folder)])
    loaded = loader.load(folder)
    layers = layer_shapes(loaded.model)
    assert layers is not None
    assert told["kv_bytes_per_token"] == slot_spec(layers).bytes_per_token
    assert told["context_length"] == loaded.context_length
    # The file has a header before its weights.
    assert 0 <= told["weight_bytes"] - loaded.weight_bytes < 10_000
    assert (told["kind"], told["number_format"], told["quantized_by"]) == (
        "plain safetensors",
        "float32",
        None,
    )


def test_a_gguf_file(smollm2_path: Path) -> None:
    told = footprint.main([str(smollm2_path)])
    assert (told["kind"], told["number_format"]) == ("GGUF", "Q4_1")
    assert told["context_length"] == 8192
    # 30 layers of 3 heads of 64, keys and values, in half precision.
    assert told["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2
    assert 0 < smollm2_path.stat().st_size - told["weight_bytes"] < 5_000_000


def test_quantizations(folder: Path) -> None:
    edit_config(folder, quantization={"bits": 4, "group_size": 64}, quantization_config={"bits": 4})
    told = footprint.main([str(folder)])
    assert (told["kind"], told["number_format"], told["quantized_by"]) == ("MLX", "4-bit", None)
    edit_config(folder, quantization=None, quantization_config={"quant_method": "awq"})
    assert footprint.main([str(folder)])["quantized_by"] == "awq"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2, "dtype": "bfloat16"}, 2304),
        ({"head_dim": 10, "num_key_value_heads": 3, "num_hidden_layers": 5, "dtype": "float16"}, 600),
        ({"num_hidden_layers": None}, None),
        ({"num_hidden_layers": "many"}, None),
        ({"num_attention_heads": "0"}, None),
        ({"num_attention_heads": 0, "head_dim": None, "num_key_value_heads": None}, None),
    ],
)
def test_kv_by_the_config(folder: Path, changes: dict[str, Any], expected: int | None) -> None:
    edit_config(folder, **changes)
    assert footprint.main([str(folder)])["kv_bytes_per_token"] == expected


def test_what_cannot_be_loaded_is_told_as_loading_would(folder: Path) -> None:
    edit_config(folder, model_type="klingon")
    told = footprint.main([str(folder)])
    assert "`klingon` is not supported" in told["error"]
    assert told["hint"]


def test_one_that_has_gone_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="`.*/gone` does not exist"):
        footprint.measure(tmp_path / "gone")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "yes"},
        {"text_config": 5},
        {"quantization": 4},
        {"num_hidden_layers": math.inf},
        {"rope_scaling": {"rope_type": "yarn", "factor": math.nan}},
    ],
)
def test_a_config_of_odd_values_is_not_supported(folder: Path, changes: dict[str, Any]) -> None:
    told = footprint.main([str(edit_config(folder, **changes))])
    assert "cannot be loaded" in told["error"]
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        model_description.describe(folder, ModelsConfig())


def test_a_model_that_is_not_here(folder: Path, tmp_path: Path) -> None:
    known = {"config": json.loads((folder / "config.json").read_text()), "architecture": None}
    told = expected(tmp_path, **known, weight_bytes=10)
    assert told == footprint.main([str(folder)]) | {"weight_bytes": 10}

    known["config"]["model_type"] = "klingon"
    assert "`klingon` is not supported" in expected(tmp_path, **known, weight_bytes=10)["error"]

    told = expected(tmp_path, config=None, architecture="llama", weight_bytes=10)
    assert (told["kind"], told["kv_bytes_per_token"]) == ("GGUF", None)
    assert "error" in expected(tmp_path, config=None, architecture="klingon", weight_bytes=10)


def expected(tmp_path: Path, **known: Any) -> dict[str, Any]:
    file = tmp_path / "known.json"
    file.write_text(json.dumps(known))
    return footprint.main(["--expect", str(file)])


def test_it_is_a_program(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", footprint.__name__, str(folder)],
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout) == footprint.main([str(folder)])


def test_the_gpu_and_the_cpu_agree_where_there_are_both() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", gpu_check.__name__], capture_output=True, check=True, timeout=120
    )
    told = json.loads(done.stdout)
    assert (told["gpu"] is not None) == mx.is_available(mx.gpu)
    assert told.get("difference", 0) < 1e-2
