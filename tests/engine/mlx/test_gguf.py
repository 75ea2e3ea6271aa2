from __future__ import annotations

import struct

import gguf_writer
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.errors import ModelError, NotAModel, UnsupportedModel

METADATA = {
    "general.architecture": "llama",
    "words": ["a", "ü", "北京"],
    "scores": [0.5, -1.0],
    "types": [3, 1],
    "flag": True,
}


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.fixture
def small_gguf(tmp_path):
    tensors = {"first": ("F32", values(3, 5)), "second": ("Q4_0", values(4, 64)), "third": ("F16", values(7))}
    return gguf_writer.write(tmp_path / "small.gguf", METADATA, tensors)


def test_metadata_are_plain_values(small_gguf):
    assert GGUFFile(small_gguf).metadata == METADATA


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_float_tensors_are_read_as_they_are(tmp_path, type_name):
    original = values(6, 10)
    file = GGUFFile(gguf_writer.write(tmp_path / "m.gguf", {}, {"t": (type_name, original)}))
    array = file.arrays(file.tensors["t"])["weight"]
    assert (
        str(array.dtype)
        == {"F32": "mlx.core.float32", "F16": "mlx.core.float16", "BF16": "mlx.core.bfloat16"}[type_name]
    )
    np.testing.assert_array_equal(array.astype(mx.float32), gguf_writer.encode(type_name, original)[1])


@pytest.mark.parametrize(("type_name", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_quantized_tensors_become_groups_of_mlx(tmp_path, type_name, bits):
    original = values(5, 96)
    file = GGUFFile(gguf_writer.write(tmp_path / "m.gguf", {}, {"t": (type_name, original)}))
    arrays = file.arrays(file.tensors["t"])
    weight = mx.dequantize(
        arrays["weight"],
        arrays["scales"].astype(mx.float32),
        arrays["biases"].astype(mx.float32),
        group_size=32,
        bits=bits,
    )
    restored = gguf_writer.encode(type_name, original)[1]
    np.testing.assert_allclose(weight, restored, atol=1e-5)
    assert np.abs(restored - original).max() < 0.3


def test_tensors_of_a_real_file_equal_those_of_mlx(smollm2_file, smollm2_path):
    expected = mx.load(str(smollm2_path))
    for name in ("token_embd.weight", "blk.7.attn_q.weight", "output_norm.weight"):
        for part, array in smollm2_file.arrays(smollm2_file.tensors[name]).items():
            assert mx.array_equal(array, expected[name.replace("weight", part)]).item()


def test_other_quantized_types_are_named(tmp_path):
    tensors = {"a": ("Q4_K", values(2, 256)), "b": ("F32", values(2))}
    path = gguf_writer.write(tmp_path / "m.gguf", {}, tensors)
    with pytest.raises(UnsupportedModel, match="`Q4_K`") as caught:
        GGUFFile(path)
    assert "Q8_0" in caught.value.hint


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "empty"),
        (lambda data: b"GGML" + data[4:], "does not begin"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
        (lambda data: data[:100], "ends within its header"),
        (lambda data: data[:-1], "`third` lies past the end"),
        (lambda data: data[:8] + struct.pack("<Q", 2**63) + data[16:], "header"),
        (lambda data: data.replace(b"third", b"first"), "`first` occurs twice"),
    ],
)
def test_a_damaged_file_is_not_a_model(small_gguf, damage, reason):
    small_gguf.write_bytes(damage(small_gguf.read_bytes()))
    with pytest.raises(NotAModel, match=reason):
        GGUFFile(small_gguf)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 900),
)
def test_no_damage_escapes_as_another_error(tmp_path, edits, cut):
    tensors = {"first": ("F32", values(3, 5)), "second": ("Q4_0", values(4, 64))}
    path = gguf_writer.write(tmp_path / "m.gguf", METADATA, tensors)
    data = bytearray(path.read_bytes())
    for position, byte in edits:
        data[position % len(data)] = byte
    path.write_bytes(data[: max(len(data) - cut, 0)] if cut < 300 else data)
    try:
        file = GGUFFile(path)
        mx.eval([file.arrays(tensor) for tensor in file.tensors.values()])
    except ModelError:
        pass
