"""What the header of a GGUF file says, every length checked against the size of the file."""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vllm_metal.errors import NotAModel

MAGIC = b"GGUF"
#: Weights of one block.
GROUP_SIZE = 32

_NUMBER_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
#: Bytes of one block of the quantized types that MLX's groups can hold.
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_PLAIN_TYPES = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}

_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_NUMBER_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", _UINT32: "I", 5: "i", 6: "f", 7: "?", _UINT64: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies. `shape` is outermost first, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int

    @property
    def is_quantized(self) -> bool:
        return self.type_name in BLOCK_BYTES

    @property
    def num_bytes(self) -> int:
        if self.is_quantized:
            return prod(self.shape) // GROUP_SIZE * BLOCK_BYTES[self.type_name]
        return prod(self.shape) * _NUMBER_BYTES[self.type_name]


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read(path: Path) -> GGUFHeader:
    """Raises NotAModel when the file is not GGUF, or ends within its header."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GGUFHeader(*_read_header(data))
    except struct.error:
        raise damaged(path, "it ends within its header") from None
    except (ValueError, OSError) as exc:
        raise damaged(path, str(exc)) from exc


def damaged(path: Path, reason: str) -> NotAModel:
    return NotAModel(
        f"`{path}` is not a usable GGUF file: {reason}",
        hint="it may have been fetched only in part; fetch it again",
    )


def quantization_name(tensors: Iterable[Tensor]) -> str | None:
    """The quantized type that most of them have."""
    types = Counter(tensor.type_name for tensor in tensors if tensor.type_name not in _PLAIN_TYPES)
    return types.most_common(1)[0][0] if types else None


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if data[:4] != MAGIC:
        raise ValueError("it does not begin with `GGUF`")
    reader = _Reader(data, position=4)
    if (version := reader.number(_UINT32)) not in (2, 3):
        raise ValueError(f"version {version} is unknown")
    num_tensors, num_metadata = reader.number(_UINT64), reader.number(_UINT64)
    metadata = {}
    for _ in range(num_metadata):
        key = reader.string()
        metadata[key] = reader.value(reader.number(_UINT32))
    infos = [_read_tensor_info(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    data_offset = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, shape, type_name, offset in infos:
        if name in tensors:
            raise ValueError(f"`{name}` occurs twice")
        tensors[name] = Tensor(name, shape, type_name, data_offset + offset)
    return metadata, tensors


def _read_tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], str, int]:
    name = reader.string()
    num_dimensions = reader.number(_UINT32)
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"`{name}` has {num_dimensions} dimensions")
    # The file names the innermost dimension first.
    shape = tuple(reader.number(_UINT64) for _ in range(num_dimensions))[::-1]
    if 0 in shape:
        raise ValueError(f"`{name}` is empty")
    type_id = reader.number(_UINT32)
    return name, shape, _TYPE_NAMES.get(type_id, f"type {type_id}"), reader.number(_UINT64)


class _Reader:
    """Walks little-endian data; raises struct.error or ValueError when it would pass the end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def number(self, type_id: int) -> Any:
        return self._unpack(_NUMBER_FORMATS[type_id])[0]

    def string(self) -> str:
        length = self.number(_UINT64)
        end = self.position + length
        if end > len(self._data):
            raise ValueError("it ends within its header")
        text = self._data[self.position : end].decode()
        self.position = end
        return text

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(self.number(_UINT32), self.number(_UINT64))
        if type_id not in _NUMBER_FORMATS:
            raise ValueError(f"metadata type {type_id} is unknown")
        return self.number(type_id)

    def _array(self, item_type_id: int, length: int) -> list[Any]:
        if item_type_id == _STRING:
            return [self.string() for _ in range(length)]
        if item_type_id not in _NUMBER_FORMATS:
            raise ValueError(f"metadata arrays of type {item_type_id} are unknown")
        return list(self._unpack(f"{length}{_NUMBER_FORMATS[item_type_id]}"))

    def _unpack(self, item_format: str) -> tuple[Any, ...]:
        layout = "<" + item_format
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return values
