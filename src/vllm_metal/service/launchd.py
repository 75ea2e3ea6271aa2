"""What the daemon must know of launchd, and the reason it leaves behind when it cannot start."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_metal import paths
from vllm_metal.errors import MetalError
from vllm_metal.service import whole_file

LABEL = "org.vllm-metal.serve"

_MAX_STDIO_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the service did not start, and at what second."""

    time: int
    message: str
    hint: str | None


def is_parent() -> bool:
    """Whether this process is the service that launchd keeps alive."""
    return os.environ.get("XPC_SERVICE_NAME") == LABEL


def log_file() -> Path:
    """The service's log, unless `log.file` is set."""
    return paths.log_dir() / "metal.log"


def stdio_file() -> Path:
    """What the service writes to its standard streams: all there is of one that died before it could log."""
    return paths.log_dir() / "stdio.log"


def truncate_stdio() -> None:
    """Empty the file behind standard error once it is large: launchd appends to it and never rotates it."""
    with suppress(OSError):
        status = os.fstat(2)
        if stat.S_ISREG(status.st_mode) and status.st_size > _MAX_STDIO_BYTES:
            os.ftruncate(2, 0)


def reason_file() -> Path:
    return paths.state_dir() / "last_error.json"


def write_reason(error: MetalError) -> None:
    """Keep why the service did not start, for `metal service status`."""
    reason = asdict(Reason(int(time.time()), error.message, error.hint))
    # On a full disk the log is all there is.
    with suppress(OSError):
        whole_file.write(reason_file(), json.dumps(reason).encode())


def read_reason() -> Reason | None:
    """What kept the service from starting, if anything did since it last listened."""
    try:
        return Reason(**json.loads(reason_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def clear_reason() -> None:
    with suppress(OSError):
        reason_file().unlink()
