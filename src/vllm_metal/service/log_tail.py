"""The end of a log file, and what is appended to it, past its rotation."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from vllm_metal.errors import ServiceError

_POLL_S = 0.2


def tail(path: Path, num_lines: int) -> str:
    """The last lines; empty where there is no file. Raises ServiceError."""
    file = _open(path)
    if file is None:
        return ""
    with file:
        return "".join(deque(file, maxlen=num_lines))


def follow(path: Path, num_lines: int) -> Iterator[str]:
    """The last lines, then without end what is appended to the file of that name. Raises ServiceError."""
    file = _open(path)
    if file:
        yield "".join(deque(file, maxlen=num_lines))
    while True:
        if _is_another(path, file):
            if file:
                yield file.read()
                file.close()
            file = _open(path)
        if file and (text := file.read()):
            yield text
        time.sleep(_POLL_S)


def _open(path: Path) -> TextIO | None:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ServiceError(f"cannot read `{path}`: {exc.strerror}", hint=f"see `ls -l '{path}'`") from exc


def _is_another(path: Path, file: TextIO | None) -> bool:
    """Whether `path` is no longer `file`, or was emptied."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if file is None:
        return True
    return not os.path.samestat(status, os.fstat(file.fileno())) or status.st_size < file.tell()
