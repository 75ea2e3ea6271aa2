"""Keeps the weights of GGUF files that had to be quantized again. No failure here is the model's."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress

import mlx.core as mx

from vllm_metal.engine.mlx import safetensors
from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.errors import NotAModel
from vllm_metal.hub import conversions
from vllm_metal.hub.disk import format_bytes

logger = logging.getLogger(__name__)


def load(file: GGUFFile) -> dict[str, mx.array] | None:
    """What `store` kept of this very file, read when it is needed."""
    kept = conversions.file_for(file.path)
    if not file.requantized_types or not kept.is_file():
        return None
    try:
        safetensors.check_file(kept)
        weights: dict[str, mx.array]
        weights, metadata = mx.load(str(kept), return_metadata=True)  # type: ignore[assignment]
    except (OSError, RuntimeError, NotAModel) as exc:
        logger.warning("`%s` cannot be read, and `%s` is converted again: %s", kept, file.path, exc)
        return None
    return weights if metadata == file.description else None


def store(file: GGUFFile, weights: dict[str, mx.array]) -> None:
    """Keep them for the next load, where the disk has room for twice as much."""
    if not file.requantized_types:
        return
    conversions.sweep()
    kept, partial = conversions.file_for(file.path), conversions.partial_file_for(file.path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(array.nbytes for array in weights.values())
        if shutil.disk_usage(kept.parent).free < 2 * needed:
            logger.warning(
                "the disk of `%s` is too full to keep the converted model, %s: it is converted at each load",
                kept.parent,
                format_bytes(needed),
            )
            return
        mx.save_safetensors(str(partial), weights, metadata=file.description)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(kept)
    except (OSError, RuntimeError) as exc:
        logger.warning("the converted model cannot be kept, and is converted at each load: %s", exc)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
