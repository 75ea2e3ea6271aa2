"""Builds the typer app and turns exceptions into one `error:` line, a hint and an exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_metal import __version__
from vllm_metal.cli import bench, chat, config, printer, pull, serve
from vllm_metal.errors import MetalError

app = typer.Typer(
    name="metal",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("pull")(pull.pull)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        printer.out(f"vllm-metal {__version__}")
        raise typer.Exit


@app.callback()
def metal(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve language models on this Mac, with OpenAI's API."""


def _prepare_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # A parent may have closed them.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As stderr is: a character that the terminal lacks is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 the user's, 2 wrong usage, 3 ours."""
    _prepare_streams()
    try:
        app()
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
