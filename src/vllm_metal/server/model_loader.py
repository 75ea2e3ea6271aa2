"""What the server asks of engines and of whoever makes them; MLX is imported by the first."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from vllm_metal.config import Config
from vllm_metal.engine.async_engine import AsyncEngine, LoadedEngine
from vllm_metal.engine.device_turns import DeviceTurns
from vllm_metal.engine.embedding_engine import EmbeddingEngine, LoadedEmbedder
from vllm_metal.engine.memory_budget import USEFUL_TOKENS, ModelNeed
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.engine.outputs import EngineStats
from vllm_metal.hub.model_kind import ModelKind, model_kind


class ServingEngine(Protocol):
    """A model on a thread of its own. `purpose` says what it does, for requests that want something else."""

    name: str
    purpose: str
    stats: EngineStats
    summary: ModelSummary | None
    failure: str | None
    failed: asyncio.Event

    @property
    def max_model_len(self) -> int: ...
    @property
    def need(self) -> ModelNeed: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def idle_s(self) -> float: ...

    async def start(self) -> None:
        """Load the model. Raises what loading raised."""

    async def stop(self) -> None:
        """Abort what runs and free the model."""

    def set_kv_budget(self, num_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Measure:
    """What a model will need, by its files' headers, and what the device has for all."""

    need: ModelNeed
    device_bytes: int


class ModelLoader(Protocol):
    async def measure(self, path: Path, config: Config) -> Measure:
        """Raises MetalError for what cannot be loaded."""

    def engine_type(self, path: Path) -> type[ServingEngine]:
        """Of the engine that runs this model."""

    def engine(self, name: str, path: Path, config: Config, room_bytes: int) -> ServingEngine:
        """Not started yet. It may take `room_bytes`, KV included."""


class MLXLoader:
    """The real one."""

    def __init__(self) -> None:
        self._turns = DeviceTurns()

    async def measure(self, path: Path, config: Config) -> Measure:
        # A thread of its own, since it is left clean of MLX.
        thread = ThreadPoolExecutor(1, thread_name_prefix="measure")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, _measure, path, config)
        finally:
            thread.shutdown(wait=False)

    def engine_type(self, path: Path) -> type[ServingEngine]:
        return AsyncEngine if model_kind(path) is ModelKind.GENERATE else EmbeddingEngine

    def engine(self, name: str, path: Path, config: Config, room_bytes: int) -> ServingEngine:
        if self.engine_type(path) is EmbeddingEngine:
            return EmbeddingEngine(
                partial(_build_embedder, name, path, config, self._turns),
                max_queued=config.server.max_queued,
                name=name,
            )
        return AsyncEngine(
            partial(_build, path, config, room_bytes, self._turns),
            max_queued=config.server.max_queued,
            seed=config.engine.seed,
            name=name,
        )


def _measure(path: Path, config: Config) -> Measure:
    from vllm_metal.engine.mlx import device, footprint

    device.select(config.engine.device)
    try:
        found = footprint.measure(path)
        length = min(config.engine.max_model_len or found.context_length, found.context_length)
        keeps_kv = model_kind(path) is ModelKind.GENERATE
        token_bytes = found.kv_bytes_per_token or 0 if keeps_kv else 0
        need = ModelNeed(
            weight_bytes=found.weight_bytes + _adapter_bytes(config),
            useful_kv_bytes=token_bytes * min(length, USEFUL_TOKENS),
            full_kv_bytes=token_bytes * length,
        )
        return Measure(need, device.memory_bytes())
    finally:
        device.leave_thread()


def _adapter_bytes(config: Config) -> int:
    folders = map(Path, config.models.adapters.values())
    files = (file for folder in folders for file in folder.glob("adapter*.safetensors"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _build(path: Path, config: Config, room_bytes: int, turns: DeviceTurns) -> LoadedEngine:
    from vllm_metal.engine.mlx.build import build

    _freeze_imports()
    return build(path, config, room_bytes=room_bytes, turns=turns)


def _build_embedder(name: str, path: Path, config: Config, turns: DeviceTurns) -> LoadedEmbedder:
    from vllm_metal.engine.mlx.embedding_build import build

    return build(path, config, name=name, turns=turns)


def _freeze_imports() -> None:
    """Leave what packages are made of out of garbage collections: each would stop all threads for 40 ms."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
