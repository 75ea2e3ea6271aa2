"""Checks that weight files are whole: MLX itself finds a missing part only when it reads it."""

from __future__ import annotations

from pathlib import Path

from vllm_metal.errors import NotAModel
from vllm_metal.hub import safetensors_header
from vllm_metal.hub.store import FETCH_AGAIN, WEIGHTS


def check_files(folder: Path) -> None:
    """Raise NotAModel for a truncated or damaged file."""
    for file in sorted(folder.glob(WEIGHTS)):
        check_file(file)


def check_file(path: Path) -> None:
    """Raise NotAModel if it is truncated or damaged."""
    try:
        header, data_offset = safetensors_header.read(path)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        missing_bytes = data_offset + max(ends, default=0) - path.stat().st_size
        if missing_bytes > 0:
            raise ValueError(f"its last {missing_bytes} bytes are missing")
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise NotAModel(f"`{path}` is damaged: {exc}", hint=FETCH_AGAIN) from exc
