"""Puts an engine together from a model on disk. Runs on the engine thread, which owns the result."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from vllm_metal.config import Config
from vllm_metal.engine.async_engine import LoadedEngine
from vllm_metal.engine.core import EngineCore, ModelRunner
from vllm_metal.engine.device_turns import DeviceTurns, Turn
from vllm_metal.engine.kv_cache_manager import KV_STEP, KVCacheManager
from vllm_metal.engine.memory_budget import USEFUL_TOKENS, ModelNeed, TooTight
from vllm_metal.engine.mlx import adapters, device, kv_cache, loader
from vllm_metal.engine.mlx.fused_runner import FusedRunner
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec
from vllm_metal.engine.mlx.loading import loading
from vllm_metal.engine.mlx.sampler import Sampler
from vllm_metal.engine.mlx.self_check import Mode, choose_mode
from vllm_metal.engine.mlx.split_runner import SplitRunner
from vllm_metal.engine.mlx.static_shapes import StaticShapes
from vllm_metal.engine.mlx.step_planner import LEAST_EXACT
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.rectangular_kv_cache_manager import RectangularKVCacheManager
from vllm_metal.engine.scheduler import Scheduler
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager
from vllm_metal.engine.step_pace import StepPace
from vllm_metal.errors import ModelError
from vllm_metal.hub import usage
from vllm_metal.structure.compiler import Compiler

logger = logging.getLogger(__name__)

#: Tokens a step when the config leaves it open. On the CPU that is half a second of prefill.
_CPU_BATCHED_TOKENS = 128
_GPU_BATCHED_TOKENS = 2048

#: Tokens below which a chunk costs nearly what this many do. Where chunks are dear for being chunks, as on
#: CUDA, StepPace finds that out; more to begin with would hold streams up on a Mac, which may prefill 300 a
#: second.
_CPU_LEAST_CHUNK = 16
_GPU_LEAST_CHUNK = 64


def build(
    path: Path, config: Config, *, room_bytes: int | None = None, turns: DeviceTurns | None = None
) -> LoadedEngine:
    """Load the model at `path` and everything around it.

    It may take `room_bytes` in all, None meaning what the configuration allows one that is alone, and steps
    by `turns`. Raises ModelError if it cannot be run here, InsufficientMemory if there is too little room.
    """
    started = time.monotonic()
    engine = config.engine
    with loading(engine.device, turns or DeviceTurns()) as turn:
        loaded = loader.load(
            path,
            dtype=engine.dtype,
            tokenizer_path=Path(config.models.tokenizer) if config.models.tokenizer else None,
            chat_template=config.models.chat_template,
            adapter_folders=[Path(folder) for folder in config.models.adapters.values()],
        )
        formats = loaded.tokenizer.output_formats(
            tools=config.models.tool_call_parser, reasoning=config.models.reasoning_parser
        )
        # Early, since reading the vocabulary holds up other threads.
        grammars = Compiler(
            loaded.tokenizer.backend.to_str,
            added_tokens=loaded.tokenizer.added_tokens,
            eos_token_ids=loaded.eos_token_ids,
        )
        max_num_batched_tokens = engine.max_num_batched_tokens or (
            _CPU_BATCHED_TOKENS if device.is_cpu() else _GPU_BATCHED_TOKENS
        )
        mode = choose_mode(loaded.model, loaded.config, loaded.tokenizer.vocab_size, path=path)
        step_bytes = _step_bytes(loaded.model, max_num_batched_tokens, turn)
        if room_bytes is None:
            room_bytes = int(engine.gpu_memory_utilization * device.memory_bytes())
        runner, kv = _runner(loaded, mode, room_bytes - loaded.weight_bytes - step_bytes, config)
        most_model_len = engine.max_model_len or loaded.context_length
        need = ModelNeed(
            weight_bytes=loaded.weight_bytes,
            step_bytes=step_bytes,
            least_kv_bytes=kv.num_bytes(min(KV_STEP, most_model_len)),
            useful_kv_bytes=kv.num_bytes(min(USEFUL_TOKENS, most_model_len)),
            full_kv_bytes=kv.num_bytes(most_model_len),
        )
        max_model_len = _max_model_len(kv, loaded.context_length, need, config)
        scheduler = Scheduler(
            kv,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pace=StepPace(engine.max_step_stretch, _CPU_LEAST_CHUNK if device.is_cpu() else _GPU_LEAST_CHUNK),
            chunk_grain=LEAST_EXACT if StaticShapes.of_device() is StaticShapes.ALL else 1,
        )
    usage.record(path)
    summary = ModelSummary(
        number_format=loaded.quantization or loaded.dtype,
        device=device.label(),
        mode=mode,
        weight_bytes=loaded.weight_bytes,
        load_s=time.monotonic() - started,
    )
    logger.info(
        "loaded `%s` in %.1f s: %s on %s, weights %.2f GB, KV budget %.2f GB, context %d, %s mode, "
        "tool calls as %s, reasoning as %s",
        path.name,
        summary.load_s,
        summary.number_format,
        summary.device,
        summary.weight_bytes / 1e9,
        kv.budget_bytes / 1e9,
        max_model_len,
        summary.mode,
        formats.tools.name,
        formats.reasoning.name,
    )
    processor = OutputProcessor(loaded.tokenizer.detokenizer, loaded.eos_token_ids)
    # On the CPU, launching a step waits for most of it: one ahead would hold every token back for a step, and
    # gains nothing once the BLAS has a thread for each core.
    core = EngineCore(scheduler, runner, processor, overlap=not device.is_cpu(), turn=turn)
    return LoadedEngine(
        core,
        loaded.tokenizer,
        max_model_len,
        loaded.generation_defaults | config.models.sampling_defaults,
        summary,
        formats,
        grammars,
        need,
        most_model_len,
        engine.max_output_tokens,
        adapters=tuple(config.models.adapters),
    )


def _runner(
    loaded: loader.LoadedModel, mode: Mode, budget_bytes: int, config: Config
) -> tuple[ModelRunner, KVCacheManager]:
    model = loaded.model
    sampler = Sampler(candidates=device.is_cpu(), eos_token_ids=loaded.eos_token_ids)
    if mode is not Mode.FUSED:
        rectangle = RectangularKVCacheManager(kv_cache.measure(model), budget_bytes)
        return SplitRunner(model, rectangle, sampler, batched=mode is Mode.SPLIT), rectangle
    layers = layer_shapes(model)
    assert layers is not None
    static = StaticShapes.of_device()
    slots = SlotKVCacheManager(
        slot_spec(layers),
        budget_bytes,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=config.engine.max_model_len or loaded.context_length,
        compact=device.is_cpu(),
        most_packed=static.most_dear_rows,
    )
    return FusedRunner(model, layers, slots, sampler, static=static), slots


def _step_bytes(model: Any, num_tokens: int, turn: Turn) -> int:
    """Peak memory of the largest prefill chunk beyond weights and KV; running it also warms the device up.

    Others that load meanwhile may add to it, never those that step.
    """
    own = adapters.of(model)
    with turn, own.used_by(mx.array([1]) if own.num_adapters else None):
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        caches = kv_cache.new_caches(model)
        model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
        return int(mx.get_peak_memory() - before)


def _max_model_len(kv: KVCacheManager, context_length: int, need: ModelNeed, config: Config) -> int:
    """The configured length, else the model's own, cut to what KV memory holds for one request."""
    wanted = config.engine.max_model_len or context_length
    if wanted > context_length:
        raise ModelError(
            f"`engine.max_model_len` is {wanted}, but the model's context is {context_length} tokens",
            hint=f"set it to at most {context_length}, or leave it out",
        )
    fits = kv.max_num_tokens(wanted, kv.budget_bytes)
    if fits < min(wanted, KV_STEP):
        raise TooTight(
            f"the model leaves no memory for requests: {device.memory_bytes() / 1e9:.1f} GB are usable and "
            f"`engine.gpu_memory_utilization` is {config.engine.gpu_memory_utilization:g}",
            need,
            hint="raise `engine.gpu_memory_utilization`, or use a smaller or more quantized model",
        )
    if fits < wanted:
        logger.warning("memory for %d tokens a request, of a context of %d", fits, wanted)
    return fits
