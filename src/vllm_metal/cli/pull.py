"""`metal pull`: bring a model to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_metal.cli import printer


def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="`org/name` or `org/name@revision` of the hub, a folder, a `.gguf` file, or `smollm2`.",
            show_default=False,
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="PATH", help="Read this configuration file.", show_default=False),
    ] = None,
) -> None:
    """Download a model, unless it is here already, and print its path."""
    from vllm_metal import config as configuration
    from vllm_metal.cli.progress import pull_progress
    from vllm_metal.hub import names
    from vllm_metal.hub import pull as hub

    models_dir = configuration.load(path=config).models.store
    with pull_progress() as on_progress:
        model = hub.pull(names.parse_source(source), models_dir=models_dir, on_progress=on_progress)
    printer.out(str(model.path))
