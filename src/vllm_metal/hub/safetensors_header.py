"""What the header of a safetensors file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000


def read(path: Path) -> tuple[dict[str, Any], int]:
    """The entries by the names of tensors, and `__metadata__`; and where in the file the data begin.

    Raises ValueError where it is damaged, OSError where it cannot be read.
    """
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        data = file.read(min(num_bytes, _MAX_HEADER_BYTES))
    if len(data) < num_bytes:
        raise ValueError("its header is longer than the file, or than any may be")
    try:
        header = json.loads(data)
    except RecursionError as exc:
        raise ValueError("its header is nested too deeply") from exc
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, 8 + num_bytes
