"""What the daemon must know of launchd, and the reason it leaves behind when it cannot start."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from vllm_metal import paths
from vllm_metal.errors import MetalError

LABEL = "org.vllm-metal.serve"


def is_parent() -> bool:
    """Whether this process is the service that launchd keeps alive."""
    return os.environ.get("XPC_SERVICE_NAME") == LABEL


def reason_file() -> Path:
    return paths.state_dir() / "last_error.json"


def write_reason(error: MetalError) -> None:
    """Keep why the service did not start, for `metal status`. Replaces the last one whole."""
    path = reason_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    reason = {"time": int(time.time()), "message": error.message, "hint": error.hint}
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(reason), encoding="utf-8")
    part.replace(path)


def clear_reason() -> None:
    with suppress(OSError):
        reason_file().unlink()
