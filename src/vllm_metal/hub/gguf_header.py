"""What the header of a GGUF file says, every length checked against the size of the file."""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from vllm_metal.errors import NotAModel
from vllm_metal.hub.variants import PART

MAGIC = b"GGUF"
# Several times that of the largest vocabularies: one that is longer is damaged, and would fill the memory.
_MAX_HEADER_BYTES = 64_000_000

#: Weights and bytes of a block of each type.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17),
}  # fmt: skip
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
_PLAIN_TYPES = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
#: Mixtures of types, by `general.file_type`; other files are called after the commonest of their types.
_MIXTURES = {
    10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS",
    24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M",
}  # fmt: skip

_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_NUMBER_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", _UINT32: "I", 5: "i", 6: "f", 7: "?", _UINT64: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies. `shape` is outermost first, `offset` counts from the start of its file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    path: Path
    offset: int

    @property
    def num_weights(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of a type in `BLOCKS`."""
        num_weights, num_bytes = BLOCKS[self.type_name]
        return self.num_weights // num_weights * num_bytes


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`paths` are the parts of the model, or the one file that it is."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    paths: tuple[Path, ...]

    @property
    def quantization(self) -> str | None:
        """What its publisher calls it, `Q4_K_M`, or the commonest quantized type; None without one."""
        types = Counter(tensor.type_name for tensor in self.tensors.values())
        quantized = [name for name, _ in types.most_common() if name not in _PLAIN_TYPES]
        if not quantized:
            return None
        file_type = self.metadata.get("general.file_type")
        return _MIXTURES.get(file_type, quantized[0]) if isinstance(file_type, int) else quantized[0]


def read(path: Path) -> GGUFHeader:
    """Of a file, or of all parts of a model whose first one is at `path`.

    Raises NotAModel when a file is missing, is not GGUF, or ends within its header.
    """
    header = _read_part(path)
    for part in _other_parts(path, header.metadata.get("split.count")):
        if not part.is_file():
            raise NotAModel(
                f"`{part}`, a part of the model, is missing",
                hint="fetch all parts of the model into one folder",
            )
        tensors = _read_part(part).tensors
        if twice := tensors.keys() & header.tensors.keys():
            raise damaged(part, f"`{min(twice)}` is in another part too")
        header = GGUFHeader(header.metadata, header.tensors | tensors, (*header.paths, part))
    num_tensors = header.metadata.get("split.tensors.count", len(header.tensors))
    if num_tensors != len(header.tensors):
        raise damaged(path, f"its parts hold {len(header.tensors)} tensors of {num_tensors}")
    return header


def _other_parts(path: Path, count: Any) -> list[Path]:
    if not isinstance(count, int) or count <= 1:
        return []
    name = PART.fullmatch(path.stem)
    if name is None or int(name["count"]) != count:
        raise damaged(path, f"it is one of {count} parts, but is not named `NAME-00001-of-{count:05}.gguf`")
    if int(name["number"]) != 1:
        raise NotAModel(
            f"`{path}` is one part of a model",
            hint=f"give the first: `{name['stem']}-00001-of-{count:05}.gguf`",
        )
    return [
        path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)
    ]


def _read_part(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            return GGUFHeader(*_read_header(path, _Reader(file)), (path,))
    except (ValueError, OSError) as exc:
        raise damaged(path, str(exc)) from exc


def damaged(path: Path, reason: str) -> NotAModel:
    return NotAModel(
        f"`{path}` is not a usable GGUF file: {reason}",
        hint="it may have been fetched only in part; fetch it again",
    )


def _read_header(path: Path, reader: _Reader) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if reader.take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with `GGUF`")
    if (version := reader.number(_UINT32)) not in (2, 3):
        raise ValueError(f"version {version} is unknown")
    num_tensors, num_metadata = reader.number(_UINT64), reader.number(_UINT64)
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"`{key}` occurs twice")
        metadata[key] = reader.value(reader.number(_UINT32))
    infos = [_read_tensor_info(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise ValueError(f"its alignment is {alignment!r}")
    data_offset = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, shape, type_name, offset in infos:
        if name in tensors:
            raise ValueError(f"`{name}` occurs twice")
        tensors[name] = Tensor(name, shape, type_name, path, data_offset + offset)
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
    """Walks little-endian data; raises ValueError when it would pass the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._file_bytes = os.fstat(file.fileno()).st_size
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self._file_bytes:
            raise ValueError("it ends within its header")
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"its header is longer than {_MAX_HEADER_BYTES} bytes")
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise ValueError("it was cut off while it was read")
        self.position = end
        return data

    def number(self, type_id: int) -> Any:
        return self._numbers(type_id, 1)[0]

    def string(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode()

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
        return list(self._numbers(item_type_id, length))

    def _numbers(self, type_id: int, count: int) -> tuple[Any, ...]:
        item_format = _NUMBER_FORMATS[type_id]
        data = self.take(count * struct.calcsize(f"<{item_format}"))
        return struct.unpack(f"<{count}{item_format}", data)
