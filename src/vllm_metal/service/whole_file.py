"""Files that are replaced whole: whoever reads one finds the old or the new."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Let `path` hold `content`, for its user alone to change. Raises OSError with nothing changed."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.chmod(0o644)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
