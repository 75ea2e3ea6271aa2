"""Logging: one line a record, on stderr or to a rotating file. Prompts, answers and keys are never logged."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path

from vllm_metal.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")

_MAX_FILE_BYTES = 10 * 1024 * 1024
_NUM_OLD_FILES = 4


def setup(level: str, file: str = "") -> None:
    """Replace the root handlers. `level` is one of `LEVELS`; no `file` means stderr. Raises ConfigError."""
    # A full disk is no reason for a traceback with every record.
    logging.raiseExceptions = False
    handler = _file_handler(Path(file)) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("vllm_metal").setLevel(level.upper())


def _file_handler(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return logging.handlers.RotatingFileHandler(
            path, maxBytes=_MAX_FILE_BYTES, backupCount=_NUM_OLD_FILES, encoding="utf-8"
        )
    except OSError as exc:
        raise ConfigError(f"cannot log to `{path}`: {exc.strerror}", hint="change `log.file`") from exc
