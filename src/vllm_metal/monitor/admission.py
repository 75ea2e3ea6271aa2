"""Whether a model that is still on the hub is worth fetching for this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import psutil

from vllm_metal.errors import UnsupportedModel
from vllm_metal.hub.disk import format_bytes
from vllm_metal.hub.repository import Repository
from vllm_metal.monitor import mlx_process
from vllm_metal.settings import EngineConfig

_FORCE = "`--force` fetches it all the same"


def judge(repository: Repository, engine: EngineConfig) -> str:
    """That it can run here, and how much context it has room for, in words.

    Raises UnsupportedModel where it cannot, and EngineError where MLX cannot be asked.
    """
    told = _ask(repository)
    if "error" in told:
        hint = f"{told['hint']}; {_FORCE}" if told["hint"] else _FORCE
        raise UnsupportedModel(told["error"], hint=hint)
    source, weights = repository.source, format_bytes(repository.weight_bytes)
    budget_bytes = int(
        engine.gpu_memory_utilization * (told["working_set_bytes"] or psutil.virtual_memory().total)
    )
    left_bytes = budget_bytes - repository.weight_bytes
    if left_bytes <= 0:
        raise UnsupportedModel(
            f"`{source}` has {weights} of weights, and models may take {format_bytes(budget_bytes)} "
            "of this machine's memory",
            hint=f"take a smaller or more quantized version of it; {_FORCE}",
        )
    fits = f"`{source}` fits: {weights} of weights in {format_bytes(budget_bytes)}"
    if not told["kv_bytes_per_token"]:
        return fits
    num_tokens = min(left_bytes // told["kv_bytes_per_token"], told["context_length"])
    return f"{fits}, with room for {num_tokens} of its {told['context_length']} tokens of context"


def _ask(repository: Repository) -> dict[str, Any]:
    known = {
        "config": repository.config,
        "architecture": repository.architecture,
        "weight_bytes": repository.weight_bytes,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "known.json"
        file.write_text(json.dumps(known))
        return mlx_process.ask("footprint", "--expect", str(file))
