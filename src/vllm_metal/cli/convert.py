"""`metal convert`: quantize a model for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_metal.cli import printer
from vllm_metal.errors import MetalError


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A folder of plain weights, or a model of the hub.", show_default=False
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Where it goes; else among the models of `models.dir`."),
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits of a weight: 2, 3, 4, 5, 6 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="Type of scales and of what is not quantized; auto takes the model's own.")
    ] = "auto",
    config: Annotated[Path | None, typer.Option(metavar="PATH", help="Read this configuration file.")] = None,
) -> None:
    """Quantize a model, and print the path of the new one.

    A model of the hub is downloaded first. The new one appears whole or not at all.
    """
    from vllm_metal import config as configuration

    loaded = configuration.load(path=config, flags={"engine.dtype": dtype})
    from vllm_metal.cli.progress import pull_progress
    from vllm_metal.engine.mlx import convert as conversion
    from vllm_metal.engine.mlx import device
    from vllm_metal.hub import names
    from vllm_metal.hub.pull import pull

    for name, value, allowed in (
        ("--bits", bits, conversion.BITS),
        ("--group-size", group_size, conversion.GROUP_SIZES),
    ):
        if value not in allowed:
            raise MetalError(f"`{name}` cannot be {value}", hint=f"it may be {', '.join(map(str, allowed))}")
    device.select(loaded.engine.device)
    wanted = names.parse_source(source, loaded.models)
    with pull_progress() as on_progress:
        model = pull(wanted, models_dir=loaded.models.store, on_progress=on_progress)
        target = folder or loaded.models.store / f"{model.name.rpartition('/')[2]}-{bits}bit"
        conversion.convert(
            model.path,
            target.absolute(),
            bits=bits,
            group_size=group_size,
            dtype=loaded.engine.dtype,
            on_progress=on_progress,
        )
    printer.out(str(target))
