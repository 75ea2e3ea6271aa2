from __future__ import annotations

import os
import shutil
import struct

import gguf_writer
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_metal.engine.mlx import gguf
from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.engine.mlx.gguf_blocks import BLOCK_TYPES
from vllm_metal.errors import ModelError, NotAModel, UnsupportedModel
from vllm_metal.hub.gguf_header import BLOCKS

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


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_blocks_hold_what_another_reader_finds_there(type_name):
    assert BLOCKS[type_name] == GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    data, expected = gguf_writer.encode(type_name, values(7, 512))
    blocks = mx.array(np.frombuffer(data, np.uint8).reshape(-1, BLOCKS[type_name][1]))
    groups = BLOCK_TYPES[type_name].decode(blocks)
    restored = np.array(groups.codes * groups.scales + groups.biases).reshape(7, 512)
    largest = np.abs(expected).max()
    if type_name.startswith(("IQ2", "IQ3_XXS")):
        # Their magnitudes are not quite the multiples of a step that they are taken for.
        np.testing.assert_allclose(restored, expected, rtol=0.076, atol=1e-6)
        assert np.sqrt(np.mean((restored - expected) ** 2)) < 0.03 * expected.std()
    else:
        np.testing.assert_allclose(restored, expected, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_quantized_tensors_become_groups_of_mlx(tmp_path, type_name):
    original = values(5, 768)
    file = GGUFFile(gguf_writer.write(tmp_path / "m.gguf", {}, {"t": (type_name, original)}))
    arrays = file.arrays(file.tensors["t"])
    block_type = BLOCK_TYPES[type_name]
    restored = mx.dequantize(
        arrays["weight"],
        arrays["scales"].astype(mx.float32),
        arrays["biases"].astype(mx.float32),
        group_size=32,
        bits=block_type.bits,
    )
    expected = gguf_writer.encode(type_name, original)[1]
    assert restored.shape == expected.shape
    error = np.abs(np.array(restored) - expected).reshape(-1, 32).max(axis=1)
    groups = expected.reshape(-1, 32)
    span = groups.max(axis=1) - groups.min(axis=1)
    # Half a step of MLX's, which is a quarter of the type's own; scales lose a little in half precision.
    bound = 0.002 if block_type.is_exact else 0.51 / (2**block_type.bits - 1)
    bound += 0.02 if type_name.startswith(("IQ2", "IQ3_XXS")) else 0.0
    assert (error <= bound * span + 0.002 * np.abs(groups).max(axis=1)).all()
    assert file.held_bytes == sum(array.nbytes for array in arrays.values())


def test_a_tensor_is_converted_in_pieces(tmp_path, monkeypatch):
    original = values(9, 256)
    file = GGUFFile(gguf_writer.write(tmp_path / "m.gguf", {}, {"t": ("Q6_K", original)}))
    whole = file.arrays(file.tensors["t"])
    monkeypatch.setattr(gguf, "_CHUNK_WEIGHTS", 1024)
    pieces = file.arrays(file.tensors["t"])
    assert all(mx.array_equal(whole[name], pieces[name]).item() for name in whole)


@pytest.mark.parametrize(
    ("types", "file_type", "expected"),
    [
        (["F32", "F16"], None, None),
        (["F32", "Q4_0", "Q4_0", "Q8_0"], 2, "Q4_0"),
        (["F32", "Q4_K", "Q5_0"], 15, "Q4_K_M"),
        (["Q4_K", "Q6_K", "Q6_K"], 15, "Q4_K_M (Q6_K as 8-bit)"),
        (["IQ4_XS", "IQ4_XS", "Q3_K"], None, "IQ4_XS (IQ4_XS as 6-bit, Q3_K as 5-bit)"),
    ],
)
def test_the_quantization_tells_what_is_held_otherwise(tmp_path, types, file_type, expected):
    metadata = {} if file_type is None else {"general.file_type": file_type}
    tensors = {f"t{index}": (name, values(2, 256)) for index, name in enumerate(types)}
    assert GGUFFile(gguf_writer.write(tmp_path / "m.gguf", metadata, tensors)).quantization == expected


PARTS = [{"first": ("F32", values(3, 5))}, {"second": ("Q4_0", values(4, 64))}, {"third": ("F16", values(7))}]


def write_parts(folder, parts=PARTS, name="m-{:05}-of-00003.gguf", **metadata):
    for index, tensors in enumerate(parts):
        split = {"split.no": index, "split.count": 3, "split.tensors.count": 3, **metadata}
        gguf_writer.write(folder / name.format(index + 1), split, tensors)
    return folder / name.format(1)


def test_all_parts_of_a_model_are_read(tmp_path):
    file = GGUFFile(write_parts(tmp_path))
    assert len(file.paths) == 3
    for tensors in PARTS:
        for name, (type_name, original) in tensors.items():
            arrays = file.arrays(file.tensors[name])
            if "scales" not in arrays:
                expected = gguf_writer.encode(type_name, original)[1]
                np.testing.assert_array_equal(arrays["weight"].astype(mx.float32), expected)


def test_a_missing_part_is_named(tmp_path):
    first = write_parts(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(NotAModel, match="m-00002-of-00003.gguf`, a part of the model, is missing"):
        GGUFFile(first)


def test_another_part_leads_to_the_first(tmp_path):
    write_parts(tmp_path)
    with pytest.raises(NotAModel, match="one part of a model") as caught:
        GGUFFile(tmp_path / "m-00002-of-00003.gguf")
    assert "`m-00001-of-00003.gguf`" in caught.value.hint


def test_parts_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(NotAModel, match="`NAME-00001-of-00003.gguf`"):
        GGUFFile(write_parts(tmp_path, name="part{}.gguf"))
    with pytest.raises(NotAModel, match="3 tensors of 4"):
        GGUFFile(write_parts(tmp_path, **{"split.tensors.count": 4}))
    with pytest.raises(NotAModel, match="`first` is in another part too"):
        GGUFFile(write_parts(tmp_path, [PARTS[0], PARTS[0], PARTS[2]]))
    first = write_parts(tmp_path)
    last = tmp_path / "m-00003-of-00003.gguf"
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(NotAModel, match="00003-of-00003.gguf` is not a usable GGUF file: `third` lies past"):
        GGUFFile(first)


def test_tensors_of_a_real_file_equal_those_of_mlx(smollm2_file, smollm2_path):
    expected = mx.load(str(smollm2_path))
    for name in ("token_embd.weight", "blk.7.attn_q.weight", "output_norm.weight"):
        for part, array in smollm2_file.arrays(smollm2_file.tensors[name]).items():
            assert mx.array_equal(array, expected[name.replace("weight", part)]).item()


def test_unknown_types_are_named(tmp_path):
    tensors = {"a": ("Q8_K", values(2, 256)), "b": ("F32", values(2))}
    path = gguf_writer.write(tmp_path / "m.gguf", {}, tensors)
    with pytest.raises(UnsupportedModel, match="`Q8_K`") as caught:
        GGUFFile(path)
    assert "Q8_0" in caught.value.hint


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "ends within its header"),
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


def test_a_header_without_end_fills_no_memory(tmp_path):
    # A file as large as models are, which takes no space: an array of a thousand million texts, all empty.
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 8, 10**9))
        file.truncate(10**10)
    with pytest.raises(NotAModel, match="header is longer than"):
        GGUFFile(path)


@pytest.mark.parametrize("key", ["general.alignment", "general.alignmen2"])
def test_a_header_that_contradicts_itself(tmp_path, key):
    path = gguf_writer.write(tmp_path / "m.gguf", {"general.alignment": 7, key: 7}, {})
    path.write_bytes(path.read_bytes().replace(b"alignmen2", b"alignment"))
    with pytest.raises(NotAModel, match="its alignment is 7|`general.alignment` occurs twice"):
        GGUFFile(path)


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_file_that_is_cut_off_while_it_is_read(small_gguf, name):
    file = GGUFFile(small_gguf)
    os.truncate(small_gguf, file.tensors[name].offset + 1)
    with pytest.raises(NotAModel, match="cut off while it was read"):
        file.arrays(file.tensors[name])


def test_a_file_that_is_replaced_while_it_is_read(small_gguf, tmp_path):
    file = GGUFFile(small_gguf)
    file.require_unchanged()
    shutil.copy2(small_gguf, tmp_path / "other")
    (tmp_path / "other").replace(small_gguf)
    with pytest.raises(NotAModel, match="was changed"):
        file.require_unchanged()
    small_gguf.unlink()
    with pytest.raises(NotAModel, match="was changed"):
        file.require_unchanged()


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
