"""Which shapes of steps recur by design: a matter of the device."""

from __future__ import annotations

import sys
from enum import Enum, auto

import mlx.core as mx

from vllm_metal.engine.mlx import device


class StaticShapes(Enum):
    """What is rounded up so that steps come in few shapes; such a step that is met again is traced, then
    replayed.
    """

    #: The CPU: an idle row costs as much as any other, and building a graph next to nothing beside computing.
    NONE = auto()
    #: Metal: kernels take any shape and prompts are bound by compute, so a row of padding is lost time. A
    #: step that only decodes is short, and building its graph a good part of it.
    DECODES = auto()
    #: CUDA: a new shape costs tens of milliseconds, for cuDNN's plans and the choice of kernels, and idle
    #: rows little.
    ALL = auto()

    @property
    def most_dear_rows(self) -> int:
        """As long as so many rows decode, or fewer, each takes its time, idle or not.

        Metal's quantized product takes rows one by one up to 6 to 32, by chip and layer, and above works on
        tiles of 32 (`get_qmv_batch_limit` in MLX).
        """
        return {StaticShapes.NONE: sys.maxsize, StaticShapes.DECODES: 12, StaticShapes.ALL: 0}[self]

    @classmethod
    def of_device(cls) -> StaticShapes:
        """Those for this thread's device."""
        if device.is_cpu():
            return cls.NONE
        return cls.ALL if mx.cuda.is_available() else cls.DECODES
