"""Adapters as mlx-lm and PEFT write them, and what is wrong with one, in words."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

import adapter_writer
import tiny_models
from vllm_metal.engine.mlx import adapter_files, loader
from vllm_metal.errors import NotAModel, UnsupportedModel

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def model():
    return tiny_models.make("llama")


@pytest.fixture
def layers(model):
    return adapter_writer.matrices(model, seed=1)


def _product(matrices):
    return matrices.a @ matrices.b


def assert_equal(adapter, other):
    assert adapter.keys() == other.keys()
    for path, matrices in adapter.items():
        np.testing.assert_allclose(_product(matrices), _product(other[path]), rtol=1e-5, atol=1e-6)


@pytest.fixture
def expected(tmp_path, model, layers):
    return adapter_files.read(adapter_writer.write_mlx(tmp_path / "as mlx-lm", layers), model, mx.float32)


def test_mlx_scales_by_what_its_config_says(expected, layers):
    assert expected.keys() == layers.keys()
    for path, (a, b) in layers.items():
        wanted = adapter_writer.SCALE * (a @ b)
        np.testing.assert_allclose(_product(expected[path]), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"lora_alpha": adapter_writer.SCALE * 2, "use_rslora": True},
        {"lora_alpha": 1, "alpha_pattern": {"q_proj|o_proj|up_proj": adapter_writer.SCALE * 4}},
        {"lora_alpha": 1, "alpha_pattern": {r"layers\.\d+\..*": adapter_writer.SCALE * 4}},
        {"r": 64, "rank_pattern": {"q_proj": 4}},
    ],
    ids=["alpha", "rslora", "alpha of layers", "alpha of a pattern", "rank of layers"],
)
def test_peft_says_the_same(tmp_path, model, layers, expected, config):
    folder = adapter_writer.write_peft(tmp_path / "as PEFT", layers, **config)
    assert_equal(adapter_files.read(folder, model, mx.float32), expected)


@pytest.mark.parametrize(
    "name", [name for name in tiny_models.CONFIGS if name not in ("mamba2", "falcon_h1")]
)
def test_peft_names_of_every_family_are_found(tmp_path, name):
    model = tiny_models.make(name)
    layers = adapter_writer.matrices(model, seed=1, only=("q_proj", "o_proj", "in_proj_qkvz"))
    folder = adapter_writer.write_peft(tmp_path / "as PEFT", layers)
    assert adapter_files.read(folder, model, mx.float32).keys() == layers.keys()


def test_a_text_model_in_a_larger_one_is_found(tmp_path, model, layers, expected):
    renamed = {path.replace("model.", "model.language_model.", 1): pair for path, pair in layers.items()}
    folder = adapter_writer.write_peft(tmp_path / "as PEFT", renamed)
    assert_equal(adapter_files.read(folder, model, mx.float32), expected)


def test_the_layers_of_a_vision_tower_are_not_taken_for_those_of_the_text(tmp_path, model, layers):
    of_the_tower = {path.replace("model.", "vision_tower.", 1): pair for path, pair in layers.items()}
    folder = adapter_writer.write_peft(tmp_path / "as PEFT", layers | of_the_tower)
    with pytest.raises(UnsupportedModel, match=r"adapts `vision_tower\..*`, which this model does not have"):
        adapter_files.read(folder, model, mx.float32)


def test_weights_that_a_model_changes_when_it_takes_them_in_are_refused(tmp_path):
    model = tiny_models.make("falcon_h1")
    layers = adapter_writer.matrices(model, seed=1, only=("k_proj",))
    folder = adapter_writer.write_peft(tmp_path / "as PEFT", layers)
    adapter_files.read(folder, model, mx.float32)
    model.args.attention_in_multiplier = 2.0
    with pytest.raises(UnsupportedModel, match=r"k_proj`, whose weights mlx-lm changes"):
        adapter_files.read(folder, model, mx.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fine_tune_type": "dora"}, "is of the type `dora`"),
        ({"fine_tune_type": "full"}, "is of the type `full`"),
    ],
)
def test_other_types_of_mlx_are_refused(tmp_path, model, layers, config, message):
    folder = adapter_writer.write_mlx(tmp_path / "a", layers, **config)
    with pytest.raises(UnsupportedModel, match=message):
        adapter_files.read(folder, model, mx.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "PEFT's type `IA3`"),
        ({"use_dora": True}, "is of the type `dora`"),
        ({"init_lora_weights": "pissa_niter_4"}, "began from `pissa_niter_4`"),
    ],
)
def test_other_types_of_peft_are_refused(tmp_path, model, layers, config, message):
    folder = adapter_writer.write_peft(tmp_path / "a", layers, **config)
    with pytest.raises(UnsupportedModel, match=message):
        adapter_files.read(folder, model, mx.float32)


def _pair(num_inputs, num_outputs, rank=4):
    return mx.zeros((num_inputs, rank)), mx.zeros((rank, num_outputs))


@pytest.mark.parametrize("write", [adapter_writer.write_mlx, adapter_writer.write_peft])
@pytest.mark.parametrize(
    ("path", "pair", "message"),
    [
        ("model.layers.9.self_attn.q_proj", _pair(32, 32), "`model.layers.9.self_attn.q_proj`, which this"),
        (Q_PROJ, _pair(48, 32), "32 inputs and 32 outputs"),
        (Q_PROJ, _pair(32, 48), "32 inputs and 32 outputs"),
        (Q_PROJ, (mx.zeros((32, 4)), mx.zeros((8, 32))), "32 inputs and 32 outputs"),
        ("model.embed_tokens", _pair(320, 32), "adapts `model.embed_tokens`; only linear layers"),
        ("model.layers.0.self_attn", _pair(32, 32), "adapts `model.layers.0.self_attn`; only linear layers"),
    ],
)
def test_an_adapter_of_another_model_is_refused(tmp_path, model, write, path, pair, message):
    with pytest.raises(UnsupportedModel, match=message):
        adapter_files.read(write(tmp_path / "a", {path: pair}), model, mx.float32)


def _truncate(folder):
    path = folder / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _claim_more(folder):
    """A shape of another size than its data."""
    path = folder / "adapters.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[32,4]', b'"shape":[32,9]', 1))


def _edit(**changes):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _keep(keep):
    def drop(folder):
        path = str(folder / "adapters.safetensors")
        mx.save_safetensors(path, {key: array for key, array in dict(mx.load(path)).items() if keep(key)})

    return drop


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json"),
        (lambda folder: (folder / "adapters.safetensors").unlink(), "lacks `adapters.safetensors`"),
        (_truncate, "is damaged: its last 10 bytes are missing"),
        (_edit(lora_parameters={}), r"adapter_config.json` is damaged: KeyError\('scale'\)"),
        (_edit(lora_parameters={"scale": "much"}), "adapter_config.json` is damaged: ValueError"),
        (_edit(lora_parameters=None), "adapter_config.json` is damaged: TypeError"),
        (_edit(lora_parameters={"scale": 10**400}), "adapter_config.json` is damaged: OverflowError"),
        (_claim_more, "adapters.safetensors` cannot be read: .*invalid data offsets"),
        (_keep(lambda key: key.endswith("lora_a")), "only one of the two matrices"),
        (_keep(lambda key: False), "adapts nothing"),
    ],
)
def test_damaged_folders(tmp_path, model, layers, damage, message):
    folder = adapter_writer.write_mlx(tmp_path / "a", layers)
    damage(folder)
    with pytest.raises(NotAModel, match=message):
        adapter_files.read(folder, model, mx.float32)


def test_patterns_that_are_none_are_told_of(tmp_path, model, layers):
    folder = adapter_writer.write_peft(tmp_path / "a", layers, alpha_pattern={"(": 1})
    with pytest.raises(NotAModel, match="adapter_config.json` is damaged: .*unterminated subpattern"):
        adapter_files.read(folder, model, mx.float32)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e6])
def test_numbers_that_would_spoil_other_rows_are_refused(tmp_path, model, layers, number):
    path, (a, b) = next(iter(layers.items()))
    for spoilt in ((a * number, b), (a, b * number)):
        folder = adapter_writer.write_mlx(
            tmp_path / str(len(list(tmp_path.iterdir()))), layers | {path: spoilt}
        )
        with pytest.raises(
            UnsupportedModel, match=f"has numbers for `{path}` that are not finite in float16"
        ):
            adapter_files.read(folder, model, mx.float16)


@pytest.mark.parametrize("write", [adapter_writer.write_mlx, adapter_writer.write_peft])
@pytest.mark.parametrize(
    "matrices",
    [
        (mx.zeros((32, 0)), mx.zeros((0, 32))),
        (mx.zeros((32, 4), mx.uint8), mx.zeros((4, 32), mx.uint8)),
    ],
    ids=["of rank 0", "of integers"],
)
def test_matrices_that_are_none_are_refused(tmp_path, model, write, matrices):
    with pytest.raises(UnsupportedModel, match="which is not LoRA of a linear layer"):
        adapter_files.read(write(tmp_path / "a", {Q_PROJ: matrices}), model, mx.float32)


def test_tensors_that_are_not_lora_are_refused(tmp_path, model, layers):
    folder = adapter_writer.write_peft(tmp_path / "a", layers)
    path = str(folder / "adapter_model.safetensors")
    key = "base_model.model.lm_head.weight"
    mx.save_safetensors(path, dict(mx.load(path)) | {key: mx.zeros((4, 4))})
    with pytest.raises(UnsupportedModel, match=f"holds `{key}`"):
        adapter_files.read(folder, model, mx.float32)


@pytest.mark.usefixtures("on_cpu")
def test_loading_counts_the_adapters_bytes(tmp_path, byte_tokenizer, model, layers):
    from test_loader import save

    folder = save(tmp_path / "model", model, byte_tokenizer)
    plain = loader.load(folder)
    adapted = loader.load(folder, adapter_folders=[adapter_writer.write_mlx(tmp_path / "a", layers)])
    num_bytes = sum(a.nbytes + b.nbytes for a, b in layers.values())
    assert adapted.weight_bytes == plain.weight_bytes + num_bytes
