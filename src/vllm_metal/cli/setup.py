"""`metal setup`: the venv that models run in."""

from __future__ import annotations

import argparse
import os
import sys

from vllm_metal import paths
from vllm_metal.cli import printer
from vllm_metal.errors import SetupError
from vllm_metal.service import requirements, setup, venv

HELP = "Make the Python environment that models run in, unless it is here and current, and print its path."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="Make it anew in any case.")
    parser.add_argument("--print-lock", action="store_true", help="Print what would be installed, and stop.")
    words = "Make it at PATH, which `VLLM_METAL_VENV` names to the other commands."
    parser.add_argument("--venv", metavar="PATH", help=words)


def run(arguments: argparse.Namespace) -> None:
    if arguments.print_lock:
        printer.out(requirements.lock().text, end="")
        return
    if stamp := venv.own_stamp():
        _hand_over(stamp.launcher)
    path = paths.venv(arguments.venv)
    setup.ensure(path, printer.note, force=arguments.force)
    if path != paths.venv():
        printer.note(f"set `VLLM_METAL_VENV` to `{path}`, so that other commands find it")
    printer.out(str(path))


def _hand_over(launcher: str) -> None:
    """The venv cannot renew itself: what it would copy is what it has."""
    try:
        os.execv(launcher, [launcher, *sys.argv[1:]])
    except OSError as exc:
        raise SetupError(
            f"this `metal` is the venv's own, and `{launcher}`, which made it, is gone",
            hint="install vllm-metal again, then run `metal setup`",
        ) from exc
