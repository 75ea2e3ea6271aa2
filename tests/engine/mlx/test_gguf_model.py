from __future__ import annotations

import json
import logging
import math
from importlib import import_module
from typing import Any

import gguf_writer
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from vllm_metal import paths
from vllm_metal.engine.mlx import gguf_cache, gguf_config, gguf_model, loader, precision
from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.errors import ModelError, NotAModel, UnsupportedModel
from vllm_metal.hub.model_config import context_length

pytestmark = pytest.mark.usefixtures("on_cpu")

NUM_LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 2, 64, 128, 4, 2, 96
HEAD_DIM, WINDOW, NUM_EXPERTS = 16, 8, 4
PROMPT = mx.array([[5, 17, 3, 90, 41, 8, 77]])
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}
NORMS_OF_GEMMA2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MODEL_TYPES = {"mistral": "llama", "gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
# What mlx-lm's classes and the files say besides, by the files' architecture.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3moe": {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma2": {
        "query_pre_attn_scalar": HEAD_DIM,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
    },
    "gemma3": {
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
    },
}
METADATA: dict[str, dict[str, Any]] = {
    "qwen3": {"attention.key_length": 32},
    "qwen3moe": {"expert_count": NUM_EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "gemma2": {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
    "gemma3": {"block_count": 7, "attention.sliding_window": WINDOW},
}
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3"]


def reference(architecture: str, *, tied: bool = True, **config: Any) -> Any:
    """mlx-lm's own model with random weights, its norms and biases too."""
    model_type = MODEL_TYPES.get(architecture, architecture)
    module = import_module(f"mlx_lm.models.{model_type}")
    arguments = {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }
    arguments |= CONFIGS.get(architecture, {}) | config
    model = module.Model(module.ModelArgs.from_dict(arguments))
    if model_type == "gemma3_text" and tied:
        model.sanitize({})
    generator = np.random.default_rng(1)
    parameters = [
        (name, mx.array(generator.normal(1 if array.ndim == 1 else 0, 0.3, array.shape).astype(np.float32)))
        for name, array in tree_flatten(model.parameters())
    ]
    model.load_weights(parameters)
    return model


def interleaved(num_rows: int, num_heads: int) -> list[int]:
    """Row order of llama-type files: the first row of a head's first half, the first of its second half, …"""
    head_dim = num_rows // num_heads
    return [
        head * head_dim + half * head_dim // 2 + index
        for head in range(num_heads)
        for index in range(head_dim // 2)
        for half in range(2)
    ]


def write(
    path, architecture, model, type_name="F32", *, permute=True, metadata=None, tensors=None
) -> GGUFFile:
    """Write `model` as a GGUF file, and give it the values that the file's types can hold."""
    names = NAMES | (NORMS_OF_GEMMA2 if architecture in ("gemma2", "gemma3") else {})
    stored, kept = {}, []
    for name, parameter in tree_flatten(model.parameters()):
        array, module = np.array(parameter), name.rpartition(".")[0]
        layer = module.removeprefix("model.layers.").partition(".")
        prefix, module = (
            (f"blk.{layer[0]}.", layer[2]) if module.startswith("model.layers.") else ("", module)
        )
        kind = "F32" if array.ndim == 1 or module == "mlp.gate" else type_name
        order = list(range(len(array)))
        if permute and architecture in ("llama", "mistral") and names[module] in ("attn_q", "attn_k"):
            order = interleaved(len(array), HEADS if names[module] == "attn_q" else KV_HEADS)
        array = array[order]
        kept.append((name, mx.array(gguf_writer.encode(kind, array)[1][np.argsort(order)])))
        if architecture.startswith("gemma") and module.endswith("norm"):
            array = array + 1
        stored[f"{prefix}{names[module]}.{name.rpartition('.')[2]}"] = (kind, array)
    model.load_weights(kept)
    keys = {
        "block_count": NUM_LAYERS,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "context_length": 512,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    keys = {
        f"{architecture}.{key}": value
        for key, value in (keys | METADATA.get(architecture, {}) | (metadata or {})).items()
        if value is not None
    }
    gguf_writer.write(
        path / "m.gguf", {"general.architecture": architecture} | keys, stored | (tensors or {})
    )
    return GGUFFile(path / "m.gguf")


def logits_of(file: GGUFFile) -> mx.array:
    model, _ = gguf_model.load_model(file)
    precision.set_precision(model, mx.float32)
    return model(PROMPT)


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_the_same_weights_in_mlx_lm(tmp_path, architecture, type_name):
    model = reference(architecture)
    file = write(tmp_path, architecture, model, type_name)
    np.testing.assert_allclose(logits_of(file), model(PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("type_name", "tolerance"),
    [("Q4_K", 0.02), ("Q5_K", 0.02), ("IQ3_S", 0.02), ("Q6_K", 0.06), ("IQ4_XS", 0.4), ("Q3_K", 0.4)],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_logits_of_types_with_large_blocks(tmp_path, architecture, type_name, tolerance):
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
    model = reference(architecture, **wide)
    metadata = {"embedding_length": 256, "feed_forward_length": 256, "attention.key_length": 64}
    if architecture == "qwen3moe":
        metadata["expert_feed_forward_length"] = 256
    file = write(tmp_path, architecture, model, type_name, metadata=metadata)
    expected = np.array(model(PROMPT))
    error = np.array(logits_of(file)) - expected
    # Random weights as large as these pass errors on thirtyfold; those of a wrong order would give 1.4.
    assert np.sqrt(np.mean(error**2)) < tolerance * expected.std()


def test_an_output_matrix_unties_the_embeddings(tmp_path):
    model = reference("qwen3", tied=False)
    np.testing.assert_allclose(
        logits_of(write(tmp_path, "qwen3", model)), model(PROMPT), rtol=1e-4, atol=1e-4
    )


def test_rows_in_another_order_change_the_answer(tmp_path):
    model = reference("llama")
    file = write(tmp_path, "llama", model, permute=False)
    assert mx.abs(logits_of(file) - model(PROMPT)).max().item() > 0.1


def test_quantized_modules_keep_the_bits_of_their_tensor(tmp_path):
    values = np.random.default_rng(2).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    file = write(
        tmp_path, "llama", reference("llama"), "Q4_0", tensors={"token_embd.weight": ("Q8_0", values)}
    )
    model, _ = gguf_model.load_model(file)
    assert (model.model.embed_tokens.bits, model.layers[0].self_attn.q_proj.bits) == (8, 4)
    assert file.quantization == "Q4_0"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, expected):
    model = reference("qwen3", rope_scaling=expected)
    file = write(tmp_path, "qwen3", model, metadata=metadata)
    assert gguf_model.load_model(file)[1]["rope_scaling"] == expected
    np.testing.assert_allclose(logits_of(file), model(PROMPT), rtol=1e-4, atol=1e-4)


def llama3_divisors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama3_frequencies_are_recognized(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = reference("llama", rope_theta=500000.0, rope_scaling=scaling)
    table = {"rope_freqs.weight": ("F32", llama3_divisors(32.0, 500000.0, HEAD_DIM))}
    file = write(tmp_path, "llama", model, metadata={"rope.freq_base": 500000.0}, tensors=table)
    assert gguf_model.load_model(file)[1]["rope_scaling"] == scaling
    np.testing.assert_allclose(logits_of(file), model(PROMPT), rtol=1e-4, atol=1e-4)


def test_other_frequency_tables_are_refused(tmp_path):
    table = llama3_divisors(32.0, 500000.0, 16)
    table[3] *= 1.5
    file = write(
        tmp_path,
        "llama",
        reference("llama"),
        metadata={"rope.freq_base": 500000.0},
        tensors={"rope_freqs.weight": ("F32", table)},
    )
    with pytest.raises(UnsupportedModel, match="frequencies"):
        gguf_model.load_model(file)


def test_a_sliding_window_bounds_the_context(tmp_path):
    file = write(tmp_path, "mistral", reference("mistral"), metadata={"attention.sliding_window": 256})
    assert gguf_model.load_model(file)[1]["max_position_embeddings"] == 256


def test_what_a_model_sees_images_with_is_left_out(tmp_path):
    model = reference("gemma3")
    tensors = {name: ("F32", np.ones(4, np.float32)) for name in ("v.blk.0.attn_q.weight", "mm.input.weight")}
    file = write(tmp_path, "gemma3", model, tensors=tensors)
    np.testing.assert_allclose(logits_of(file), model(PROMPT), rtol=1e-4, atol=1e-4)


def test_gemma3_has_a_rope_of_its_own_where_its_file_has_none(tmp_path):
    file = write(tmp_path, "gemma3", reference("gemma3"), metadata={"rope.freq_base": None})
    config = gguf_config.read_config(file)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1_000_000.0, 10_000.0)


def test_windows_of_gemma3_leave_its_context_whole(tmp_path):
    config = gguf_config.read_config(write(tmp_path, "gemma3", reference("gemma3")))
    assert config["max_position_embeddings"] == 512
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (WINDOW, 6)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"attention.sliding_window": None}, 1),
        ({"attention.sliding_window_pattern": 4}, 4),
        ({"attention.sliding_window_pattern": [True, True, False, True, True, False, True]}, 3),
    ],
)
def test_the_pattern_of_gemma3s_windows(tmp_path, metadata, expected):
    file = write(tmp_path, "gemma3", reference("gemma3"), metadata=metadata)
    assert gguf_config.read_config(file)["sliding_window_pattern"] == expected


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_queries_by_their_width(tmp_path, architecture, num_layers):
    usual = write(tmp_path, architecture, reference(architecture), metadata={"embedding_length": 96})
    assert gguf_config.read_config(usual)["query_pre_attn_scalar"] == HEAD_DIM
    metadata = {"block_count": num_layers, "embedding_length": 96}
    model = reference(architecture, num_hidden_layers=num_layers)
    largest = write(tmp_path, architecture, model, metadata=metadata)
    assert gguf_config.read_config(largest)["query_pre_attn_scalar"] == 96 // HEADS


def test_gemmas_of_any_quantization_compute_in_bfloat16(tmp_path):
    for architecture, dtype in (("gemma", "bfloat16"), ("llama", "float16")):
        file = write(tmp_path, architecture, reference(architecture), "Q8_0")
        assert gguf_config.read_config(file)["dtype"] == dtype


def test_phi3_rotates_a_part_of_its_heads_with_long_factors(tmp_path):
    long, short = [1.0, 2.0, 3.0, 4.0], [1.0, 1.5, 2.0, 2.5]
    scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
    model = reference(
        "phi3", rope_scaling=scaling, partial_rotary_factor=0.5, original_max_position_embeddings=64
    )
    tensors = {
        f"rope_factors_{kind}.weight": ("F32", np.array(factors, np.float32))
        for kind, factors in (("long", long), ("short", short))
    }
    metadata = {
        "rope.dimension_count": HEAD_DIM // 2,
        "rope.scaling.original_context_length": 64,
        "attention.sliding_window": 100,
    }
    file = write(tmp_path, "phi3", model, metadata=metadata, tensors=tensors)
    assert gguf_config.read_config(file)["max_position_embeddings"] == 512
    np.testing.assert_allclose(logits_of(file), model(PROMPT), rtol=1e-4, atol=1e-4)


def test_parts_of_a_model_load_as_one(tmp_path):
    model = reference("qwen3")
    whole = write(tmp_path, "qwen3", model, "Q8_0")
    names = list(whole.tensors)
    for index, chosen in enumerate((names[::2], names[1::2])):
        metadata = whole.metadata if index == 0 else {}
        split = {"split.no": index, "split.count": 2, "split.tensors.count": len(names)}
        tensors = {name: ("F32", dense(whole, name)) for name in chosen}
        gguf_writer.write(tmp_path / f"m-{index + 1:05}-of-00002.gguf", metadata | split, tensors)
    parts = GGUFFile(tmp_path / "m-00001-of-00002.gguf")
    np.testing.assert_allclose(logits_of(parts), model(PROMPT), rtol=1e-4, atol=1e-4)


def dense(file: GGUFFile, name: str) -> np.ndarray:
    arrays = file.arrays(file.tensors[name])
    if "scales" not in arrays:
        return np.array(arrays["weight"])
    scales, biases = (arrays[part].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(arrays["weight"], scales, biases, group_size=32, bits=8))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"context_length": None}, NotAModel, "lacks `llama.context_length`"),
        ({"attention.head_count": 0}, NotAModel, "`llama.attention.head_count`"),
        ({"embedding_length": "wide"}, NotAModel, "`llama.embedding_length`"),
        ({"expert_count": 8}, UnsupportedModel, "mixtures of experts"),
        ({"attention.head_count_kv": [2, 1]}, UnsupportedModel, "layers of .* differ"),
        ({"rope.scaling.type": "longrope"}, UnsupportedModel, "`longrope`"),
        ({"rope.dimension_count": 8}, UnsupportedModel, "part of each attention head"),
    ],
)
def test_metadata_that_cannot_be_served(tmp_path, metadata, error, message):
    file = write(tmp_path, "llama", reference("llama"), metadata=metadata)
    with pytest.raises(error, match=message):
        gguf_model.load_model(file)


ODD = st.sampled_from(
    [0, -1, 1, 7, 2**31, 2**64 - 1, 1e-300, 0.5, 1e300, math.inf, -math.inf, math.nan]
    + [True, "", "abc", [], [1, 2], ["a"], [True, False], None]
)
MORE_KEYS = [
    "attention.sliding_window", "attention.sliding_window_pattern", "expert_count", "final_logit_softcapping",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
]  # fmt: skip


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_metadata_are_read_or_refused(tmp_path, data):
    architecture = data.draw(st.sampled_from(["llama", "qwen3moe", "gemma2", "gemma3", "phi3"]))
    path = tmp_path / architecture
    if not path.exists():
        path.mkdir()
        write(path, architecture, reference(architecture))
    file = GGUFFile(path / "m.gguf")
    keys = sorted({key for key in file.metadata if "." in key} | {f"{architecture}.{k}" for k in MORE_KEYS})
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        file.metadata[key] = data.draw(ODD)
    try:
        config = gguf_config.read_config(file)
    except ModelError:
        return
    assert config["num_hidden_layers"] == len([name for name in file.tensors if "attn_norm" in name])
    assert context_length(config) > 0
    json.dumps(config, allow_nan=False)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": 3_000_000_000}, "'3000000000' for `llama.block_count`, which cannot be"),
        ({"block_count": 2_000_000_000}, "it holds 2 of 2000000000 layers"),
        ({"block_count": 1}, "it holds 2 of 1 layers"),
        ({"rope.dimension_count": 7}, "'7' for `llama.rope.dimension_count`, which cannot be"),
        ({"rope.dimension_count": HEAD_DIM + 2}, "'18' for `llama.rope.dimension_count`, which cannot be"),
        ({"rope.freq_base": math.nan}, "'nan' for `llama.rope.freq_base`, which cannot be"),
    ],
)
def test_metadata_that_cannot_be_true(tmp_path, metadata, message):
    with pytest.raises(NotAModel, match=message):
        gguf_config.read_config(write(tmp_path, "llama", reference("llama"), metadata=metadata))


def test_a_vocabulary_larger_than_the_embeddings_is_refused(tmp_path):
    file = write(tmp_path, "llama", reference("llama"))
    file.metadata["tokenizer.ggml.tokens"] = ["a"] * VOCAB
    gguf_config.read_config(file)
    file.metadata["tokenizer.ggml.tokens"] = ["a"] * (VOCAB + 1)
    with pytest.raises(NotAModel, match="96 embeddings of 97 tokens"):
        gguf_config.read_config(file)


def test_a_conversion_that_does_not_fit_is_made_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path, "llama", reference("llama"), "Q8_0")
    expected = logits_of(file)
    monkeypatch.setattr(GGUFFile, "requantized_types", ["Q8_0"])
    gguf_cache.store(file, {"model.norm.weight": mx.ones(3)})
    assert mx.array_equal(logits_of(file), expected).item()
    assert "converted again" in caplog.text
    caplog.clear()
    assert mx.array_equal(logits_of(file), expected).item()
    assert "convert" not in caplog.text


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("qwen3moe", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope scaling `yarn`"),
        ("gemma3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope scaling `yarn`"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "caps its logits"),
        ("gemma3", {"attention.sliding_window_pattern": [True, False, False]}, "no known pattern"),
    ],
)
def test_what_a_familys_class_does_not_offer_is_refused(tmp_path, architecture, metadata, message):
    file = write(tmp_path, architecture, reference(architecture), metadata=metadata)
    with pytest.raises(UnsupportedModel, match=message):
        gguf_config.read_config(file)


def test_unknown_tensors_and_architectures_are_refused(tmp_path):
    extra = {"blk.0.ssm_a.weight": ("F32", np.ones(4, np.float32))}
    with pytest.raises(UnsupportedModel, match="`blk.0.ssm_a.weight`"):
        gguf_model.load_model(write(tmp_path, "llama", reference("llama"), tensors=extra))
    path = gguf_writer.write(tmp_path / "other.gguf", {"general.architecture": "mamba"}, {})
    with pytest.raises(UnsupportedModel, match="`mamba`"):
        gguf_model.load_model(GGUFFile(path))


@pytest.mark.slow
def test_a_real_mixture_of_types_goes_on_with_a_text_and_is_converted_once(
    gemma3_path, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    assert continuation(gemma3_path) == " Thursday, Friday, Saturday, Sunday,"
    [kept] = paths.conversions_dir().iterdir()
    written = kept.stat().st_mtime_ns
    assert "convert" in caplog.text
    caplog.clear()
    assert continuation(gemma3_path) == " Thursday, Friday, Saturday, Sunday,"
    assert kept.stat().st_mtime_ns == written
    assert "convert" not in caplog.text


def continuation(path) -> str:
    loaded = loader.load(path)
    assert loaded.quantization == "Q4_K_M (Q6_K as 8-bit)"
    cache = loaded.model.make_cache()
    ids, text_ids = mx.array([loaded.tokenizer.encode("Monday, Tuesday, Wednesday,")]), []
    for _ in range(8):
        ids = mx.argmax(loaded.model(ids, cache=cache)[:, -1], axis=-1)[None]
        text_ids.append(ids.item())
    return loaded.tokenizer.decode(text_ids)
