"""Reads the tensors of GGUF files into MLX's layouts, their places checked against the size of the file."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from vllm_metal.errors import UnsupportedModel
from vllm_metal.hub import gguf_header
from vllm_metal.hub.gguf_header import BLOCK_BYTES, GROUP_SIZE, Tensor, damaged

_FLOAT_TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


class GGUFFile:
    """One GGUF file whose header has been checked.

    Raises NotAModel when the file is not GGUF, is truncated or is corrupt, and UnsupportedModel for tensor
    types that MLX's groups cannot hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = gguf_header.read(path)
        self.metadata, self.tensors = header.metadata, header.tensors
        self._check_tensors()

    def arrays(self, tensor: Tensor) -> dict[str, mx.array]:
        """`weight`, and for a quantized tensor also the `scales` and `biases` of MLX's groups of 32.

        A quantized weight is packed in uint32 along its last axis, the bits that MLX's own layers expect.
        """
        arrays = self._lazy_arrays(tensor)
        # Evaluated at once, so that the file's own bytes are not kept beside them.
        mx.eval(arrays)
        return arrays

    def _lazy_arrays(self, tensor: Tensor) -> dict[str, mx.array]:
        raw = mx.array(
            np.memmap(self.path, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,))
        )
        if not tensor.is_quantized:
            return {"weight": raw.view(_FLOAT_TYPES[tensor.type_name]).reshape(tensor.shape)}
        blocks = raw.reshape(-1, BLOCK_BYTES[tensor.type_name])
        scales = blocks[:, :2].view(mx.float16)
        if tensor.type_name == "Q8_0":
            # int8 becomes uint8 with an offset of 128.
            values, biases = blocks[:, 2:] ^ 0x80, -128 * scales
        elif tensor.type_name == "Q4_0":
            values, biases = _pack_nibbles(blocks[:, 2:]), -8 * scales
        else:
            values, biases = _pack_nibbles(blocks[:, 4:]), blocks[:, 2:4].view(mx.float16)
        rows = tensor.shape[:-1]
        return {
            "weight": values.view(mx.uint32).reshape(*rows, -1),
            "scales": scales.reshape(*rows, -1),
            "biases": biases.reshape(*rows, -1),
        }

    def _check_tensors(self) -> None:
        tensors = self.tensors.values()
        unsupported = sorted(
            {tensor.type_name for tensor in tensors} - _FLOAT_TYPES.keys() - BLOCK_BYTES.keys()
        )
        if unsupported:
            names = ", ".join(f"`{name}`" for name in unsupported)
            raise UnsupportedModel(
                f"`{self.path}` holds tensors of type {names}, which are not supported",
                hint="use a Q4_0, Q4_1, Q8_0, F16, BF16 or F32 file of the model, or its MLX version",
            )
        size = self.path.stat().st_size
        for tensor in tensors:
            if tensor.is_quantized and tensor.shape[-1] % GROUP_SIZE:
                raise damaged(self.path, f"the rows of `{tensor.name}` are not whole blocks")
            if tensor.offset + tensor.num_bytes > size:
                raise damaged(self.path, f"`{tensor.name}` lies past the end of the file")


def _pack_nibbles(blocks: mx.array) -> mx.array:
    """From GGUF's order (a block's first 16 weights in low nibbles, its last in high ones) to MLX's."""
    values = mx.concatenate([blocks & 0x0F, blocks >> 4], axis=1)
    return values[:, 0::2] | (values[:, 1::2] << 4)
