"""What the server's process can tell at any time of the machine that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_metal.monitor import host
from vllm_metal.monitor.host import Host
from vllm_metal.monitor.reading import GpuReading
from vllm_metal.monitor.snapshot import read_gpu

if TYPE_CHECKING:
    from vllm_metal.engine.mlx.memory import MemoryUse

_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """`memory` is what MLX holds; None for what nothing tells."""

    host: Host | None = None
    gpu: GpuReading | None = None
    memory: MemoryUse | None = None


def look(*, with_mlx: bool) -> Machine:
    """Takes a moment, and no rights of root. `with_mlx` is for a process that has loaded a model."""
    return Machine(host.read(), read_gpu(_INTERVAL_S, with_power=False), _memory() if with_mlx else None)


def _memory() -> MemoryUse:
    # MLX takes a second to import where no model has done so.
    from vllm_metal.engine.mlx import memory

    return memory.read()
