"""The whole `metal`, as a typer app."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from vllm_metal.cli import (
    bench,
    chat,
    config,
    convert,
    doctor,
    installed,
    launch,
    launcher,
    load,
    printer,
    program,
    pull,
    serve,
    show,
    status,
    top,
)
from vllm_metal.service import venv

app = typer.Typer(
    name="metal",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("launch")(launch.launch)
app.command("pull")(pull.pull)
app.command("list")(installed.list_models)
app.command("show")(show.show)
app.command("rm")(installed.remove)
app.command("convert")(convert.convert)
app.command("load")(load.load)
app.command("stop")(load.stop)
app.command("status")(status.status)
app.command("ps")(status.ps)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")


def _add_own_command(name: str) -> None:
    """The launcher knows its arguments, all of which go there."""

    def command(context: typer.Context) -> None:
        launcher.run_own(name, context.args)

    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    words = launcher.own_command(name).HELP
    app.command(name, help=words, add_help_option=False, context_settings=settings)(command)


for own in launcher.OWN_COMMANDS:
    _add_own_command(own)


def _version(wanted: bool) -> None:
    if wanted:
        printer.out(launcher.VERSION)
        raise typer.Exit


@app.callback(help=launcher.DESCRIPTION)
def metal(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What is common to all commands."""
    if context.invoked_subcommand not in launcher.OWN_COMMANDS:
        # An upgrade may not remove what this runs from. A venv that `metal setup` did not make has no stamp.
        with suppress(OSError):
            venv.hold(Path(sys.prefix))


def main() -> None:
    """Entry point of the venv's `metal`."""
    program.run(app)
