"""The `metal` that is installed without packages: standard library only.

It runs the commands that look after the venv and the service, and for the others becomes the venv's `metal`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from vllm_metal import __version__, paths
from vllm_metal.cli import printer, program
from vllm_metal.errors import MetalError, SetupError
from vllm_metal.service import launchd, setup, venv

DESCRIPTION = "Serve language models on this Mac, with OpenAI's API."
VERSION = f"vllm-metal {__version__}"

OWN_COMMANDS = ("setup", "service", "uninstall")
"""Modules of `cli` that are an `OwnCommand`. They and all that they import are standard library only."""

VENV_COMMANDS = {
    "serve": "Serve a model on http://localhost:8000 with OpenAI's API.",
    "chat": "Chat with a model.",
    "launch": "Start a coding agent that uses the running server.",
    "pull": "Download models, unless they are here already, and print their paths.",
    "list": "List the models on this machine, also those of LM Studio and Ollama.",
    "show": "Show what a model is and takes, how its answers are read and why, and its chat template.",
    "rm": "Delete a model from this machine.",
    "convert": "Quantize a model, and print the path of the new one.",
    "load": "Have the server load a model, and wait until it is there.",
    "stop": "Have the server unload models, each once its running requests have ended.",
    "status": "Show the server, its models and requests, and the service.",
    "ps": "List the server's models.",
    "top": "Watch the GPU and the daemon.",
    "doctor": "Check this machine, the configuration and the daemon.",
    "config": "Show or change the configuration.",
    "bench": "Measure how fast models are served.",
}


class OwnCommand(Protocol):
    HELP: str
    """One line, which `metal --help` shows."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, arguments: argparse.Namespace) -> None:
        """Do it. Raises MetalError."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the installed `metal`."""
    program.run(lambda: launch(sys.argv[1:] if argv is None else argv))


def launch(argv: Sequence[str]) -> None:
    """Run an own command, or become the venv's `metal`, which never returns."""
    command = argv[0] if argv else None
    if command in OWN_COMMANDS:
        run_own(command, argv[1:])
    elif command in VENV_COMMANDS:
        _become_venvs_metal(argv)
    else:
        parser = _parser()
        parser.parse_args(argv)
        parser.print_help()
        sys.exit(2)


def run_own(command: str, argv: Sequence[str]) -> None:
    own_command(command).run(own_parser(command).parse_args(argv))


def own_command(command: str) -> OwnCommand:
    return cast(OwnCommand, importlib.import_module(f"vllm_metal.cli.{command}"))


def own_parser(command: str) -> Parser:
    module = own_command(command)
    parser = Parser(prog=f"metal {command}", description=module.HELP)
    module.configure(parser)
    return parser


class Parser(argparse.ArgumentParser):
    """Options are never guessed from their first letters, and errors look as all others do."""

    def __init__(self, **known: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=_HelpFormatter, **known)
        self.add_argument("-h", "--help", action="help", help="Show this message and exit.")

    def error(self, message: str) -> NoReturn:
        printer.error(MetalError(message, hint=f"see `{self.prog} --help`"))
        sys.exit(2)


class _HelpFormatter(argparse.HelpFormatter):
    """Has room for the longest command beside its words."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            # argparse forgets that it indents these once more.
            self._action_max_length += self._indent_increment


def _parser() -> Parser:
    parser = Parser(prog="metal", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=VERSION, help="Print the version and exit.")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name in OWN_COMMANDS:
        commands.add_parser(name, help=own_command(name).HELP)
    for name, words in VENV_COMMANDS.items():
        commands.add_parser(name, help=words)
    return parser


def _become_venvs_metal(argv: Sequence[str]) -> NoReturn:
    while True:
        version = _ready_version()
        # Another process may have renewed the venv meanwhile, and removed this version.
        with suppress(FileNotFoundError):
            venv.hold(version)
            break
    python = str(version / "bin/python")
    os.execv(python, [python, str(version / "bin/metal"), *argv])


def _ready_version() -> Path:
    """Not the link to it, which may move under a process that still imports."""
    try:
        version = setup.ensure(paths.venv(), printer.note)
    except SetupError as exc:
        if not launchd.is_parent():
            raise
        launchd.write_reason(exc)
        if exc.retryable:
            raise
        # Exit 0, or launchd would start us again every few seconds with the same result.
        printer.error(exc)
        sys.exit(0)
    setup.prune(paths.venv())
    return version
