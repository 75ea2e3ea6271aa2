"""Runs a `main` as a program: streams it can rely on, and exceptions as an `error:` line, a hint, a code."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from vllm_metal.cli import printer
from vllm_metal.errors import MetalError


def run(main: Callable[[], object]) -> None:
    """Exit codes: 0 done, 1 the user's, 2 wrong usage, 3 ours."""
    _prepare_streams()
    try:
        main()
    except MetalError as exc:
        printer.error(exc)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has gone; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as exc:
        logging.getLogger(__name__).debug("unexpected error", exc_info=True)
        printer.error(
            MetalError(
                f"internal error: {type(exc).__name__}: {exc}",
                hint="this is a bug in vllm-metal; run again with METAL_LOG_LEVEL=debug for the traceback",
            )
        )
        sys.exit(3)


def _prepare_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # A parent may have closed them.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As stderr is: a character that the terminal lacks is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")
