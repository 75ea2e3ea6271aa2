"""Reads the tensors of GGUF files into MLX's layouts, their places checked against the size of the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from vllm_metal.engine.mlx.gguf_blocks import BLOCK_TYPES, Groups
from vllm_metal.errors import NotAModel, UnsupportedModel
from vllm_metal.hub import conversions, gguf_header
from vllm_metal.hub.gguf_header import BLOCKS, Tensor, damaged

#: Weights that share a scale and a bias.
GROUP_SIZE = 32

_FLOAT_TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
# So many weights are taken apart at once. What that takes is small beside any model.
_CHUNK_WEIGHTS = 1 << 23


class GGUFFile:
    """One GGUF file, or all parts of a model, whose headers have been checked.

    Raises NotAModel when a file is missing, is not GGUF, is truncated or is corrupt, and UnsupportedModel for
    types of tensors that are not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = gguf_header.read(path)
        self.metadata, self.tensors, self.paths = header.metadata, header.tensors, header.paths
        self.description = conversions.description(self.paths)
        self._quantization = header.quantization
        self._check_tensors()

    @property
    def requantized_types(self) -> list[str]:
        """Those that MLX's groups hold only after quantizing them again."""
        types = {tensor.type_name for tensor in self.tensors.values()} & BLOCK_TYPES.keys()
        return sorted(name for name in types if not BLOCK_TYPES[name].is_exact)

    @property
    def quantization(self) -> str | None:
        """The file's, and what is not held as it is there: `Q4_K_M (Q6_K as 8-bit)`."""
        changes = ", ".join(f"{name} as {BLOCK_TYPES[name].bits}-bit" for name in self.requantized_types)
        return f"{self._quantization} ({changes})" if changes else self._quantization

    @property
    def held_bytes(self) -> int:
        """What the tensors take in MLX's layouts."""
        return sum(map(_held_bytes, self.tensors.values()))

    def arrays(self, tensor: Tensor) -> dict[str, mx.array]:
        """`weight`, and for a quantized tensor also the float16 `scales` and `biases` of MLX's groups.

        A quantized weight is packed in uint32 along its last axis, the bits that MLX's own layers expect.
        """
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            if tensor.type_name in _FLOAT_TYPES:
                raw = _read(file, tensor, tensor.num_bytes)
                weight = raw.view(_FLOAT_TYPES[tensor.type_name]).reshape(tensor.shape)
                mx.eval(weight)
                return {"weight": weight}
            chunks = [_converted(tensor.type_name, blocks) for blocks in _blocks(file, tensor)]
        arrays = {
            name: mx.concatenate([chunk[name] for chunk in chunks]).reshape(*tensor.shape[:-1], -1)
            for name in chunks[0]
        }
        mx.eval(arrays)
        return arrays

    def require_unchanged(self) -> None:
        """Raise NotAModel unless the files on disk are those whose headers were read."""
        with suppress(OSError):
            if conversions.description(self.paths) == self.description:
                return
        raise NotAModel(
            f"`{self.path}` was changed while it was read", hint="load it again once it is written"
        )

    def _check_tensors(self) -> None:
        tensors = self.tensors.values()
        unknown = sorted({tensor.type_name for tensor in tensors} - BLOCKS.keys())
        if unknown:
            names = ", ".join(f"`{name}`" for name in unknown)
            raise UnsupportedModel(
                f"`{self.path}` holds tensors of type {names}, which are not supported",
                hint="use a file of another quantization, such as Q4_K_M or Q8_0, or the model's MLX version",
            )
        sizes = {path: path.stat().st_size for path in self.paths}
        for tensor in tensors:
            if tensor.shape[-1] % BLOCKS[tensor.type_name][0]:
                raise damaged(tensor.path, f"the rows of `{tensor.name}` are not whole blocks")
            if tensor.offset + tensor.num_bytes > sizes[tensor.path]:
                raise damaged(tensor.path, f"`{tensor.name}` lies past the end of the file")


def _held_bytes(tensor: Tensor) -> int:
    if tensor.type_name in _FLOAT_TYPES:
        return tensor.num_bytes
    scale_and_bias = 2 * mx.float16.size
    group_bytes = GROUP_SIZE * BLOCK_TYPES[tensor.type_name].bits // 8 + scale_and_bias
    return tensor.num_weights // GROUP_SIZE * group_bytes


def _blocks(file: BinaryIO, tensor: Tensor) -> Iterator[mx.array]:
    """uint8 [N, bytes of a block], from where the file stands."""
    block_weights, block_bytes = BLOCKS[tensor.type_name]
    num_blocks, step = tensor.num_weights // block_weights, _CHUNK_WEIGHTS // block_weights
    for start in range(0, num_blocks, step):
        count = min(step, num_blocks - start)
        yield _read(file, tensor, count * block_bytes).reshape(count, block_bytes)


def _read(file: BinaryIO, tensor: Tensor, num_bytes: int) -> mx.array:
    # Never mapped: to read from a map of a file that is cut off meanwhile is the end of the process.
    raw = np.fromfile(file, np.uint8, num_bytes)
    if len(raw) < num_bytes:
        raise damaged(tensor.path, "it was cut off while it was read")
    return mx.array(raw)


def _converted(type_name: str, blocks: mx.array) -> dict[str, mx.array]:
    block_type = BLOCK_TYPES[type_name]
    groups = block_type.decode(blocks)
    if not block_type.is_exact:
        groups = _requantized(groups, block_type.bits)
    arrays = {
        "weight": _packed(groups.codes, block_type.bits),
        "scales": groups.scales.reshape(-1).astype(mx.float16),
        "biases": groups.biases.reshape(-1).astype(mx.float16),
    }
    mx.eval(arrays)
    return arrays


def _requantized(groups: Groups, bits: int) -> Groups:
    """In MLX's groups, the steps spread evenly from each one's lowest weight to its highest."""
    weights = (groups.codes * groups.scales + groups.biases).reshape(-1, GROUP_SIZE)
    lowest, highest = weights.min(axis=1, keepdims=True), weights.max(axis=1, keepdims=True)
    last_code = 2**bits - 1
    # Rounded as they will be, so that the codes make up for that.
    biases = lowest.astype(mx.float16).astype(mx.float32)
    scales = ((highest - biases) / last_code).astype(mx.float16).astype(mx.float32)
    codes = mx.round((weights - biases) / mx.maximum(scales, 1e-30))
    return Groups(mx.clip(codes, 0, last_code).astype(mx.uint8), scales, biases)


def _packed(codes: mx.array, bits: int) -> mx.array:
    """uint32: each code's bits right after those of the one before."""
    # The fewest codes that fill whole bytes.
    count = 8 // math.gcd(bits, 8)
    num_bytes = bits * count // 8
    dtype = next(dtype for dtype in (mx.uint8, mx.uint32, mx.uint64) if dtype.size >= num_bytes)
    codes = codes.reshape(-1, count).astype(dtype)
    packed = codes[:, 0]
    for index in range(1, count):
        packed = packed | (codes[:, index] << (bits * index))
    return packed.reshape(-1, 1).view(mx.uint8)[:, :num_bytes].reshape(-1).view(mx.uint32)
