from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import tiny_models
from chat_prompt import encode_chat
from vllm_metal.engine.mlx import loader
from vllm_metal.errors import NotAModel, UnsupportedModel

pytestmark = pytest.mark.usefixtures("on_cpu")

PROMPT = mx.array([[5, 17, 3, 90, 41]])


def save(folder: Path, model: nn.Module, tokenizer: Any, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.args) | config))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, byte_tokenizer) -> Path:
    return save(tmp_path / "tiny", tiny_models.make("qwen3"), byte_tokenizer, eos_token_id=7)


def test_a_folder_gives_the_model_that_was_saved(folder):
    loaded = loader.load(folder)
    np.testing.assert_allclose(loaded.model(PROMPT), tiny_models.make("qwen3")(PROMPT), rtol=1e-5, atol=1e-5)
    assert not loaded.model.training
    assert loaded.context_length == 4096
    assert loaded.eos_token_ids == {7, 257}
    assert (loaded.quantization, loaded.dtype) == (None, "float32")
    assert loaded.weight_bytes == sum(
        array.nbytes for array in mx.load(str(folder / "model.safetensors")).values()
    )
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hé")) == "hé"


def test_a_quantized_folder_is_expanded_on_the_cpu(tmp_path, byte_tokenizer):
    model = tiny_models.make("qwen3")
    nn.quantize(model, group_size=32, bits=4)
    folder = save(tmp_path / "4bit", model, byte_tokenizer, quantization={"group_size": 32, "bits": 4})
    loaded = loader.load(folder)
    np.testing.assert_allclose(loaded.model(PROMPT), model(PROMPT), rtol=1e-4, atol=1e-4)
    assert (loaded.quantization, loaded.dtype) == ("4-bit", "float32")


def test_a_dtype_can_be_asked_for(folder):
    assert loader.load(folder, dtype="bfloat16").dtype == "bfloat16"


def test_generation_config_gives_defaults_and_end_tokens(folder):
    generation_config = {"temperature": 0.6, "top_k": 20, "eos_token_id": [8, 9], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    loaded = loader.load(folder)
    assert loaded.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert loaded.eos_token_ids == {7, 8, 9, 257}
    (folder / "generation_config.json").write_text(json.dumps(generation_config | {"do_sample": False}))
    assert loader.load(folder).generation_defaults == {}


def test_a_tokenizer_and_a_template_from_elsewhere(folder, tmp_path, byte_tokenizer):
    byte_tokenizer.add_special_tokens({"pad_token": "<pad>"})
    byte_tokenizer.save_pretrained(tmp_path / "other")
    loaded = loader.load(folder, tokenizer_path=tmp_path / "other", chat_template="{{ messages[0].content }}")
    assert loaded.tokenizer.encode("<pad>") == [258]
    assert encode_chat(loaded.tokenizer, [{"role": "user", "content": "</s>"}]) == [257]


def test_end_tokens_of_a_file_stay_with_a_tokenizer_from_elsewhere(smollm2_path, folder):
    assert loader.load(smollm2_path, tokenizer_path=folder).eos_token_ids == {2, 257}


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def edit_config(**changes: Any):
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if value is not None})
        )

    return edit


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def split_without_second_part(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def drop_a_weight(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["model.norm.weight"]
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def only_pytorch(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), NotAModel, "not a model folder: it has no `config.json`"),
        (write("config.json", b"{"), NotAModel, "not valid JSON"),
        (write("config.json", b"[]"), NotAModel, "not a JSON object"),
        (write("config.json", b"[" * 200_000), NotAModel, "not valid JSON"),
        (
            edit_config(model_type="klingon"),
            UnsupportedModel,
            "model architecture `klingon` is not supported",
        ),
        (edit_config(model_type="../qwen3"), UnsupportedModel, "is not supported"),
        (edit_config(model_type="base"), UnsupportedModel, "cannot be loaded"),
        (edit_config(model_type=None), UnsupportedModel, "`None` is not supported"),
        (edit_config(model_file="model.py"), UnsupportedModel, "never run"),
        (edit_config(hidden_size=None), UnsupportedModel, "hidden_size"),
        (edit_config(hidden_size=48), UnsupportedModel, "shape"),
        (edit_config(eos_token_id={}), UnsupportedModel, "cannot be loaded"),
        (remove("model.safetensors"), NotAModel, "holds no `model\\*.safetensors`"),
        (write("model.safetensors", b"\xff" * 64), NotAModel, "header is longer than the file"),
        (write("model.safetensors", b"\x02" + bytes(7) + b"{]"), NotAModel, "damaged"),
        (write("model.safetensors", b"\x40\x0d\x03" + bytes(5) + b"[" * 200_000), NotAModel, "too deeply"),
        (truncate, NotAModel, "last 100 bytes are missing"),
        (split_without_second_part, NotAModel, "lacks `model-00002-of-00002.safetensors`"),
        (drop_a_weight, UnsupportedModel, "model.norm.weight"),
        (only_pytorch, UnsupportedModel, "PyTorch"),
        (no_tokenizer, NotAModel, "holds no tokenizer"),
        (write("tokenizer.json", b"{"), UnsupportedModel, "tokenizer of .* cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_says_why(folder, damage, error, message):
    damage(folder)
    with pytest.raises(error, match=message) as caught:
        loader.load(folder)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_path_that_leads_nowhere(tmp_path):
    with pytest.raises(NotAModel, match="does not exist"):
        loader.load(tmp_path / "nothing")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NotAModel, match="not a usable GGUF file"):
        loader.load(tmp_path / "notes.txt")


def test_smollm2_from_its_file_alone_knows_the_capital_of_france(smollm2_path):
    loaded = loader.load(smollm2_path)
    assert (loaded.context_length, loaded.quantization, loaded.dtype) == (8192, "Q4_1", "float32")
    ids = loaded.tokenizer.encode("The capital of France is")
    cache = make_prompt_cache(loaded.model)
    detokenizer, text, tokens = loaded.tokenizer.detokenizer(ids), "", ids
    for _ in range(6):
        tokens = [loaded.model(mx.array([tokens]), cache=cache)[0, -1].argmax().item()]
        text += detokenizer.add(tokens[0])
    assert "Paris" in text + detokenizer.flush()


def test_importing_the_loader_keeps_the_limit_on_open_files():
    script = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import vllm_metal.engine.mlx.build\n"
        "assert 'mlx_lm' in __import__('sys').modules\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 100\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
