"""When each model was last loaded: an empty file a model, of that age."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from vllm_metal import paths


def record(path: Path) -> None:
    """`path` is a model's, and has been loaded now. That it cannot be kept is no reason to stop."""
    file = _file(path)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def last(path: Path) -> float | None:
    """Seconds since the epoch; None for a model that was never loaded here."""
    try:
        return _file(path).stat().st_mtime
    except OSError:
        return None


def forget(path: Path) -> None:
    with suppress(OSError):
        _file(path).unlink()


def _file(path: Path) -> Path:
    # Links stay: what they lead to goes by another name after an update.
    name = hashlib.sha256(os.path.abspath(path).encode(errors="surrogateescape")).hexdigest()  # noqa: PTH100
    return paths.last_used_dir() / name[:32]
