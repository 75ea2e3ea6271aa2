"""The whole `metal`, as a typer app."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_metal import __version__
from vllm_metal.cli import bench, chat, config, printer, program, pull, serve

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


def main() -> None:
    """Entry point of the venv's `metal`."""
    program.run(app)
