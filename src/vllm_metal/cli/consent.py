"""Asks before what cannot be taken back. Standard library only."""

from __future__ import annotations

import sys

from vllm_metal.cli import printer
from vllm_metal.errors import MetalError


def agrees(command: str) -> bool:
    """Raises MetalError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise MetalError(f"`{command}` asks first, and here is no terminal", hint="`--yes` says yes")
    printer.note("remove? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
