"""`metal top`: what the GPU and the daemon are doing, as it goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_metal.cli import printer
from vllm_metal.errors import MetalError

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_metal.monitor.reading import GpuReading
    from vllm_metal.monitor.snapshot import Snapshot

# Enough for every line: what goes to a file or a program must not be cut off.
_PIPE_WIDTH = 250


def _seconds(value: float) -> float:
    # Not typer's own limits, which let "nan" pass.
    if not 0.1 <= value <= 3600:
        raise typer.BadParameter("must be from 0.1 to 3600")
    return value


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one look, or a line for each sample of `--from`.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", callback=_seconds, help="How long each look lasts.")
    ] = 1.0,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Read output of `powermetrics` instead, `-` for standard input."
        ),
    ] = None,
    power: Annotated[
        bool, typer.Option("--power", help="Ask `sudo -n powermetrics` for states, frequency and power.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(help="Server to watch, `unix:/path` for a socket; else the configured one."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key the server asks for.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file to use.")] = None,
) -> None:
    """Watch the GPU and the daemon.

    On a terminal this goes on until Ctrl-C; elsewhere it is one look.
    """
    from rich.console import Console

    from vllm_metal.client import client_of
    from vllm_metal.config import load
    from vllm_metal.monitor.snapshot import Watch

    if source is not None and power:
        raise typer.BadParameter(
            "`--from` brings its own figures: leave out one of the two", param_hint="--power"
        )
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    is_live = console.is_terminal and not console.is_dumb_terminal and not once and not as_json
    if source is not None and str(source) != "-":
        snapshots = _recorded(source)
    else:
        watch = Watch(client_of(load(path=config).server, url, api_key))
        if source is not None:
            snapshots = map(watch.take_with, _readings(source))
        else:
            snapshots = iter(lambda: watch.take(interval, with_power=power), None)
            once = once or not is_live
    if is_live:
        _show_live(snapshots, console)
        return
    for number, snapshot in enumerate(snapshots):
        if number and not as_json:
            printer.out()
        printer.out(_json(snapshot) if as_json else _text(snapshot, console))
        if once:
            return


def _recorded(path: Path) -> Iterator[Snapshot]:
    """What a file tells: nothing of this machine, nor of now."""
    from vllm_metal.monitor.snapshot import Snapshot
    from vllm_metal.monitor.verdict import judge

    return (Snapshot(gpu=reading, verdict=judge(reading)) for reading in _readings(path))


def _readings(path: Path) -> Iterator[GpuReading]:
    """Raises MetalError for a file that cannot be read or holds no sample."""
    from vllm_metal.monitor import powermetrics

    name = "standard input" if str(path) == "-" else f"`{path}`"
    none_yet = True
    for reading in powermetrics.readings(_chunks(path, name)):
        none_yet = False
        yield reading
    if none_yet:
        raise MetalError(
            f"{name} holds no sample of the GPU",
            hint="record some with `sudo powermetrics --samplers gpu_power -i 1000 -n 10 -o FILE`",
        )


def _chunks(path: Path, name: str) -> Iterator[bytes]:
    try:
        # Not to wait until a buffer is full: samples come a second apart.
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            yield from iter(partial(file.read1, 65536), b"")  # type: ignore[union-attr]
    except OSError as exc:
        raise MetalError(f"cannot read {name}: {exc.strerror}") from exc


def _show_live(snapshots: Iterator[Snapshot], console: Console) -> None:
    """Redraw one screen until the end or Ctrl-C, which leaves the last look behind."""
    from rich.live import Live
    from rich.text import Text

    from vllm_metal.cli.top_view import render

    last: Snapshot | None = None
    waiting = Text("waiting for the first sample")
    with suppress(KeyboardInterrupt), Live(waiting, console=console, screen=True, auto_refresh=False) as live:
        for last in snapshots:
            live.update(render(last, console.width), refresh=True)
    if last is not None:
        printer.out(_text(last, console))


def _json(snapshot: Snapshot) -> str:
    import dataclasses
    import json

    return json.dumps(dataclasses.asdict(snapshot))


def _text(snapshot: Snapshot, console: Console) -> str:
    from vllm_metal.cli.top_view import render

    with console.capture() as capture:
        console.print(render(snapshot, console.width, with_details=True))
    return capture.get().rstrip("\n")
