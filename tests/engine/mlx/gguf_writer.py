"""Writes small GGUF files, independently of the reader under test."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

ALIGNMENT = 32
_NO_QUANTIZER = {
    # Where the half-precision numbers of a block lie: its scale, and what its minima are multiples of.
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,),
    "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    """`tensors` maps a name to its type's name and its float32 values."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    data = b""
    for name, (type_name, values) in tensors.items():
        data += b"\0" * (-len(data) % ALIGNMENT)
        dimensions = values.shape[::-1]
        header += _string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        header += struct.pack("<IQ", GGMLQuantizationType[type_name], len(data))
        data += encode(type_name, values)[0]
    path.write_bytes(header + b"\0" * (-len(header) % ALIGNMENT) + data)
    return path


def encode(type_name: str, values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The bytes of a tensor and the values that they stand for, which are about `values`.

    Types that no quantizer is at hand for get other values of about the same size.
    """
    kind = GGMLQuantizationType[type_name]
    if type_name == "Q8_K":
        return b"\0" * (values.size // 256 * 292), np.zeros_like(values)
    data = _blocks(type_name, values) if type_name in _NO_QUANTIZER else quantize(values, kind)
    return data.tobytes(), dequantize(data, kind).reshape(values.shape).astype(np.float32)


def _blocks(type_name: str, values: np.ndarray) -> np.ndarray:
    kind = GGMLQuantizationType[type_name]
    num_weights, num_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(zlib.crc32(values.tobytes()))
    blocks = generator.integers(0, 256, (values.size // num_weights, num_bytes), np.uint8)
    _set_scale(type_name, blocks, 1.0)
    _set_scale(type_name, blocks, float(values.std() / dequantize(blocks, kind).std()))
    return blocks.reshape(*values.shape[:-1], -1)


def _set_scale(type_name: str, blocks: np.ndarray, scale: float) -> None:
    half = np.array([scale], "<f2").view(np.uint8)
    if type_name == "IQ1_M":
        # Its nibbles are the upper ones of four words.
        for word in range(4):
            nibble = half[word // 2] >> (4 * (word % 2)) & 15
            blocks[:, 49 + 2 * word] = (blocks[:, 49 + 2 * word] & 15) | (nibble << 4)
        return
    position, *minimum = _NO_QUANTIZER[type_name]
    blocks[:, position : position + 2] = half
    for place in minimum:
        factor = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}[type_name]
        blocks[:, place : place + 2] = np.array([scale * factor], "<f2").view(np.uint8)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return (
            struct.pack("<I", 9)
            + items[0][:4]
            + struct.pack("<Q", len(items))
            + b"".join(i[4:] for i in items)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value)
