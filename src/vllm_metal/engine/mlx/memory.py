"""The memory that MLX holds in this process."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of all models together; `cache_bytes` are kept for reuse, `peak_bytes` the most that was active."""

    active_bytes: int
    cache_bytes: int
    peak_bytes: int


def read() -> MemoryUse:
    """On any thread: this makes no array."""
    return MemoryUse(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())
