"""The device that MLX computes on, and how much of its memory is ours to use."""

from __future__ import annotations

import gc
import os

import mlx.core as mx
import psutil

from vllm_metal.errors import ConfigError

# On CUDA, MLX keeps this many graphs of 20 operations, and a step is some 30 of them. With its own 400, steps
# of a dozen shapes would be made anew each time. Read when MLX first uses the device.
os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "4096")


def select(name: str) -> None:
    """Make `auto`, `gpu` or `cpu` this thread's default device. Raises ConfigError if there is none."""
    if name == "gpu" and not mx.is_available(mx.gpu):
        raise ConfigError(
            "`engine.device` is `gpu`, but MLX finds no GPU here", hint='set `engine.device = "auto"`'
        )
    if name != "auto":
        mx.set_default_device(mx.gpu if name == "gpu" else mx.cpu)


def memory_of(name: str) -> int:
    """What `memory_bytes` will tell on a thread that has selected `name`."""
    on_cpu = name == "cpu" or not mx.is_available(mx.gpu)
    return _memory_bytes(on_cpu=on_cpu)


def is_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


def memory_bytes() -> int:
    """What MLX may use in all: Metal's recommended working set, a GPU's memory, what a host has to spare."""
    return _memory_bytes(on_cpu=is_cpu())


def _memory_bytes(*, on_cpu: bool) -> int:
    info = {} if on_cpu else mx.device_info()
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if size := info.get(key):
            return int(size)
    return int(psutil.virtual_memory().available + mx.get_active_memory())


def prepare() -> None:
    """Keep weights and KV resident (Metal only), and freed buffers from piling up."""
    limit = memory_bytes()
    if mx.metal.is_available():
        mx.set_wired_limit(limit)
    mx.set_cache_limit(limit // 16)


def leave_thread() -> None:
    """End this thread's use of MLX, its arrays being dropped: one that keeps streams aborts at its end."""
    gc.collect()  # of what held them, too
    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()
