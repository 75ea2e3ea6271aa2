"""The device that MLX computes on, and how much of its memory is ours to use."""

from __future__ import annotations

import gc
import os
import threading
from queue import Empty, SimpleQueue
from typing import Literal

import mlx.core as mx
import psutil

from vllm_metal.errors import ConfigError

# On CUDA, MLX makes a graph of every 20 operations before it launches them. Steps of new shapes then take
# tens of milliseconds and none is faster for it (docs/performance.md). Read when MLX first uses the device.
os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")

#: CPU streams that nobody uses just now. Behind each is a thread that MLX never ends, so whoever comes takes
#: one of these over.
_free_cpu_streams: SimpleQueue[mx.Stream] = SimpleQueue()
_thread = threading.local()


def select(name: str) -> None:
    """Begin to use MLX on this thread, on `auto`, `gpu` or `cpu`. Raises ConfigError if there is no GPU."""
    if name == "gpu" and not mx.is_available(mx.gpu):
        raise ConfigError(
            "`engine.device` is `gpu`, but MLX finds no GPU here", hint='set `engine.device = "auto"`'
        )
    if name != "auto":
        mx.set_default_device(mx.gpu if name == "gpu" else mx.cpu)
    if not hasattr(_thread, "cpu_stream"):
        try:
            _thread.cpu_stream = _free_cpu_streams.get_nowait()
        except Empty:
            _thread.cpu_stream = mx.new_thread_unsafe_stream(mx.cpu)
    mx.set_default_stream(_thread.cpu_stream)


def is_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


def label() -> Literal["CPU", "GPU"]:
    """For people."""
    return "CPU" if is_cpu() else "GPU"


def memory_bytes() -> int:
    """What MLX may use in all: Metal's recommended working set, a GPU's memory, what a host has to spare."""
    info = {} if is_cpu() else mx.device_info()
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
    if hasattr(_thread, "cpu_stream"):
        _free_cpu_streams.put(_thread.cpu_stream)
        del _thread.cpu_stream
