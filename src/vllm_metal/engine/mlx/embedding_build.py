"""Puts an embedding engine together from a model on disk. Runs on its thread, which owns the result."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import mlx.core as mx

from vllm_metal.config import Config
from vllm_metal.engine.device_turns import DeviceTurns, Turn
from vllm_metal.engine.embedding_core import EmbeddingCore
from vllm_metal.engine.embedding_engine import LoadedEmbedder
from vllm_metal.engine.embedding_request import EmbeddingInput
from vllm_metal.engine.memory_budget import ModelNeed
from vllm_metal.engine.mlx import bert, device, embedding_loader
from vllm_metal.engine.mlx.loading import loading
from vllm_metal.engine.mlx.pooling_runner import PoolingRunner
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.errors import UnsupportedModel
from vllm_metal.hub import usage

logger = logging.getLogger(__name__)

#: Tokens of a batch, padding included. More would be no quicker, and hold more memory.
_CPU_BATCH_TOKENS = 1024
_GPU_BATCH_TOKENS = 8192


def build(path: Path, config: Config, *, name: str, turns: DeviceTurns) -> LoadedEmbedder:
    """Load the model at `path`, called `name`, and everything around it. Raises ModelError if it cannot be
    run here.
    """
    if config.models.adapters:
        raise UnsupportedModel(
            f"`{name}` does not generate text, so it takes no LoRA adapters",
            hint="take `adapters` out of its section, or `--lora-modules` from the command line",
        )
    started = time.monotonic()
    engine = config.engine
    with loading(engine.device, turns) as turn:
        loaded = embedding_loader.load(path, dtype=engine.dtype, max_model_len=engine.max_model_len)
        runner = PoolingRunner(loaded.model, loaded.head)
        max_tokens = _CPU_BATCH_TOKENS if device.is_cpu() else _GPU_BATCH_TOKENS
        step_bytes = _step_bytes(runner, loaded.traits.max_model_len, max_tokens, turn)
    usage.record(path)
    summary = ModelSummary(
        number_format=loaded.number_format,
        device=device.label(),
        mode="encoder" if isinstance(loaded.model, bert.Bert) else "decoder",
        weight_bytes=loaded.weight_bytes,
        load_s=time.monotonic() - started,
    )
    logger.info(
        "loaded `%s` in %.1f s: %s on %s, weights %.2f GB, context %d, %s",
        name,
        summary.load_s,
        summary.number_format,
        summary.device,
        summary.weight_bytes / 1e9,
        loaded.traits.max_model_len,
        "compares texts" if loaded.traits.compares else f"vectors of {loaded.traits.dimensions}",
    )
    need = ModelNeed(weight_bytes=summary.weight_bytes, step_bytes=step_bytes)
    core = EmbeddingCore(runner, turn, max_tokens=max_tokens, max_length=loaded.traits.max_model_len)
    return LoadedEmbedder(core, loaded.tokenizer, loaded.traits, need, summary)


def _step_bytes(runner: PoolingRunner, max_model_len: int, max_tokens: int, turn: Turn) -> int:
    """Peak memory of a full batch beyond the weights, or of the longest input as that lets expect; running it
    also warms the device up.
    """
    length = min(max_model_len, max_tokens)
    with turn:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.compute([EmbeddingInput([0] * length)] * (max_tokens // length))
        peak_bytes = mx.get_peak_memory() - before
    return int(peak_bytes * max(1, max_model_len / max_tokens))
