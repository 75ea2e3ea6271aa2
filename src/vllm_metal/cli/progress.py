"""Shows a pull: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_metal.cli import printer
from vllm_metal.hub.disk import format_bytes
from vllm_metal.hub.progress import OnProgress, PullProgress

_LINE_EVERY_S = 2.0
_LINE_EVERY_SHARE = 0.05


@contextmanager
def pull_progress() -> Iterator[OnProgress]:
    """The callback for `hub.pull.pull`."""
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield plain_lines()


def plain_lines(clock: Callable[[], float] = time.monotonic) -> OnProgress:
    """A line for each stage, then one at most every 5 % and 2 s."""
    stage = ""
    shown_share, shown_at_s = 0.0, 0.0

    def show(progress: PullProgress) -> None:
        nonlocal stage, shown_share, shown_at_s
        share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0
        if progress.stage != stage:
            stage, shown_share, shown_at_s = progress.stage, 0.0, clock()
            printer.note(stage)
        elif share - shown_share >= _LINE_EVERY_SHARE and clock() - shown_at_s >= _LINE_EVERY_S:
            shown_share, shown_at_s = share, clock()
            done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
            printer.note(f"{stage}: {share:.0%} ({done} of {total})")

    return show


@contextmanager
def _bar() -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        stage = ""

        def show(progress: PullProgress) -> None:
            nonlocal stage
            if progress.stage != stage:
                stage = progress.stage
                bar.reset(task, description=stage)  # a rate is of one stage
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes or None)

        yield show
