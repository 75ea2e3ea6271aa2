"""Checks of what MLX makes of the GPU, and of the model on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_metal.errors import EngineError, MetalError
from vllm_metal.hub import store
from vllm_metal.hub.disk import format_bytes
from vllm_metal.hub.names import configured_source
from vllm_metal.monitor import mlx_process
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings
from vllm_metal.settings import EngineConfig

# Some GPUs multiply float32 in less than float32's precision.
_TOLERANCE = 1e-2
_UTILIZATION = "engine.gpu_memory_utilization"


def gpu(surroundings: Surroundings) -> Iterator[Finding]:
    """A small product of matrices on the GPU, and the same on the CPU."""
    if not mlx_process.has_mlx():
        yield Finding("skipped", "GPU", "MLX is not installed in this Python")
        return
    try:
        told = mlx_process.ask("gpu_check")
    except EngineError as exc:
        yield Finding(
            "problem",
            "GPU",
            exc.message,
            why="models run through MLX and nothing else",
            hint="restart the Mac; if that does not help, update macOS and run `metal setup`",
        )
        return
    if told["gpu"] is None:
        if surroundings.host.is_mac:
            yield Finding(
                "problem",
                "GPU",
                "MLX finds no Metal GPU",
                why="models run on the CPU, many times slower",
                hint="run this on the Mac itself: a virtual machine or a sandbox may hide its GPU",
            )
        else:
            yield Finding("skipped", "GPU", "MLX has none here")
    elif not told["difference"] <= _TOLERANCE:
        yield Finding(
            "problem",
            "GPU",
            f"{told['gpu']} computes other figures than the CPU, off by {told['difference']:.1%}",
            why="answers of models would be nonsense",
            hint="update macOS and restart the Mac; if it stays so, have the Mac looked at",
        )
    else:
        yield Finding("ok", "GPU", f"{told['gpu']} computes what the CPU does")


def model(surroundings: Surroundings) -> Iterator[Finding]:
    """The format of the configured model, and whether it fits."""
    if surroundings.config_error:
        yield Finding("skipped", "model", "the configuration is not valid")
        return
    models = surroundings.config.models
    try:
        source = configured_source(models)
        local = store.find(source, models_dir=models.store)
        if local is None:
            yield Finding("skipped", "model", f"`{source}` is not here yet: `metal pull` fetches it")
            return
        if not mlx_process.has_mlx():
            yield Finding("skipped", "model", "MLX is not installed in this Python")
            return
        told = mlx_process.ask("footprint", str(local.path))
        if "error" in told:
            raise MetalError(told["error"], hint=told["hint"])
    except MetalError as exc:
        yield Finding("problem", "model", exc.message, why="the server cannot serve it", hint=exc.hint)
        return
    yield _format(local.path, told)
    yield _fit(told, surroundings)


def _format(path: Path, told: dict[str, Any]) -> Finding:
    named = f"`{path.name}`: {told['kind']}, {told['number_format'] or 'unknown format'}"
    if told["quantized_by"]:
        return Finding(
            "warning",
            "model",
            f"{named}, quantized by `{told['quantized_by']}` for other programs",
            why="MLX must convert such weights, if it can, and runs its own quantization faster",
            hint="take the model's MLX version, as from `mlx-community` on the hub",
        )
    return Finding("ok", "model", f"{named}, {told['context_length']} tokens of context")


def _fit(told: dict[str, Any], surroundings: Surroundings) -> Finding:
    subject, working_set = "model's memory", told["working_set_bytes"]
    if working_set is None:
        return Finding("skipped", subject, "there is no GPU whose memory could be too small")
    engine, weights = surroundings.config.engine, told["weight_bytes"]
    num_tokens = engine.max_model_len or told["context_length"]
    kv_bytes_per_token = told["kv_bytes_per_token"] or 0
    needed = weights + kv_bytes_per_token * num_tokens
    budget = engine.gpu_memory_utilization * working_set
    kv = format_bytes(needed - weights)
    takes = f"{format_bytes(weights)} of weights and {kv} of KV for {num_tokens} tokens"
    if weights >= working_set:
        return Finding(
            "problem",
            subject,
            f"{format_bytes(weights)} of weights, and the GPU may use {format_bytes(working_set)}",
            why="the model cannot be loaded",
            hint="take a smaller or more quantized model",
        )
    if needed > budget:
        return Finding(
            "problem" if weights >= budget else "warning",
            subject,
            f"{takes}, and {format_bytes(budget)} are allowed",
            why="the model cannot be loaded" if weights >= budget else "the context is cut to what fits",
            hint=_more_room(needed, working_set, kv_bytes_per_token, weights, engine),
        )
    available = surroundings.host.memory_available_bytes
    # What is available is what a server that has loaded the model has left.
    if needed > available and not surroundings.serves():
        # Rounded down, and never to less than the weights need.
        share = max(math.floor(20 * available / working_set) / 20, _share(weights, working_set))
        advice = f", or set `{_UTILIZATION} = {share:g}`" if share * working_set <= available else ""
        return Finding(
            "warning",
            subject,
            f"{takes}, and {format_bytes(available)} of memory are available",
            why="macOS would have to compress and swap memory",
            hint=f"close programs{advice}",
        )
    return Finding("ok", subject, f"{takes} fit the {format_bytes(budget)} that are allowed")


def _more_room(
    needed: int, working_set: int, kv_bytes_per_token: int, weights: int, engine: EngineConfig
) -> str:
    if needed <= working_set:
        return f"set `{_UTILIZATION} = {_share(needed, working_set):g}`"
    fits = int(engine.gpu_memory_utilization * working_set - weights) // kv_bytes_per_token
    if fits <= 0:
        return f"set `{_UTILIZATION} = 1.0`, or take a smaller or more quantized model"
    return f"set `engine.max_model_len = {fits}`, or take a smaller or more quantized model"


def _share(num_bytes: int, working_set: int) -> float:
    """The setting that gives at least `num_bytes`, with two digits."""
    return math.ceil(100 * num_bytes / working_set) / 100
