"""The one place that writes to the terminal: data to stdout, talk to stderr."""

from __future__ import annotations

import sys
from contextlib import suppress

from vllm_metal.errors import MetalError


def out(text: str = "", *, end: str = "\n") -> None:
    """Data, which a user may pipe. Raises MetalError when it cannot be written, BrokenPipeError as it is."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise MetalError(f"cannot write to standard output: {exc.strerror}") from exc


def note(text: str = "", *, end: str = "\n") -> None:
    """Talk: what is going on. That nobody can hear it stops no work."""
    with suppress(OSError):
        sys.stderr.write(text + end)
        sys.stderr.flush()


def warning(text: str) -> None:
    note(f"{_style('warning:', '33')} {text}")


def error(exc: MetalError) -> None:
    """`error: …`, and after a blank line `hint: …`."""
    note(f"{_style('error:', '31')} {exc.message}")
    if exc.hint:
        note(f"\n{_style('hint:', '36')} {exc.hint}")


def _style(text: str, code: str) -> str:
    import os

    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        return text
    return f"\x1b[1;{code}m{text}\x1b[0m"
