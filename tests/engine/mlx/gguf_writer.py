"""Writes small GGUF files, independently of the reader under test."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
BLOCK = 32
_TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "BF16": 30}


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
        header += struct.pack("<IQ", _TYPE_IDS[type_name], len(data))
        data += encode(type_name, values)[0]
    path.write_bytes(header + b"\0" * (-len(header) % ALIGNMENT) + data)
    return path


def encode(type_name: str, values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The bytes of a tensor and the values that they stand for."""
    if type_name == "F32":
        return values.astype("<f4").tobytes(), values
    if type_name == "F16":
        halves = values.astype("<f2")
        return halves.tobytes(), halves.astype(np.float32)
    if type_name == "BF16":
        words = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        return words.tobytes(), (words.astype("<u4") << 16).view("<f4")
    if type_name == "Q4_K":
        return b"\0" * (values.size // 256 * 144), np.zeros_like(values)
    blocks = values.reshape(-1, BLOCK)
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    if type_name == "Q8_0":
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
        quantized = np.clip(np.round(blocks / scale.astype(np.float32)), -128, 127).astype(np.int8)
        parts, restored = [scale, quantized], quantized * scale.astype(np.float32)
    elif type_name == "Q4_0":
        scale = (np.maximum(-low, high) / 7).astype("<f2")
        quantized = np.clip(np.round(blocks / scale.astype(np.float32)) + 8, 0, 15).astype(np.uint8)
        parts = [scale, _nibbles(quantized)]
        restored = (quantized.astype(np.float32) - 8) * scale.astype(np.float32)
    else:
        scale, minimum = ((high - low) / 15).astype("<f2"), low.astype("<f2")
        quantized = np.clip(np.round((blocks - low) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
        parts = [scale, minimum, _nibbles(quantized)]
        restored = quantized * scale.astype(np.float32) + minimum.astype(np.float32)
    rows = np.concatenate([part.view(np.uint8).reshape(len(blocks), -1) for part in parts], axis=1)
    return rows.tobytes(), restored.reshape(values.shape).astype(np.float32)


def _nibbles(quantized: np.ndarray) -> np.ndarray:
    return quantized[:, : BLOCK // 2] | (quantized[:, BLOCK // 2 :] << 4)


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
