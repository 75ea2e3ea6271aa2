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
_LINE_EVERY_PERCENT = 5


@contextmanager
def pull_progress() -> Iterator[OnProgress]:
    """The callback for `hub.pull.pull`."""
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield plain_lines()


def plain_lines(clock: Callable[[], float] = time.monotonic) -> OnProgress:
    """A line for each stage, then one at most every 5% and 2 s."""
    stage, shown_percent, shown_at_s = "", 0, 0.0

    def show(progress: PullProgress) -> None:
        nonlocal stage, shown_percent, shown_at_s
        percent = progress.done_bytes * 100 // (progress.total_bytes or 1)
        if progress.stage != stage:
            stage, shown_percent, shown_at_s = progress.stage, 0, clock()
            printer.note(stage)
        elif percent - shown_percent >= _LINE_EVERY_PERCENT and clock() - shown_at_s >= _LINE_EVERY_S:
            shown_percent, shown_at_s = percent, clock()
            done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
            printer.note(f"{stage}: {percent}% ({done} of {total})")

    return show


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """A line for each stage, and while it counts bytes a bar below; nothing before the first stage."""
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
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(bar_width=25),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    stage = ""

    def show(progress: PullProgress) -> None:
        nonlocal stage
        if progress.stage != stage:
            stage = progress.stage
            bar.stop()
            for finished in bar.task_ids:
                bar.remove_task(finished)
            printer.note(stage)
        if not progress.total_bytes:
            return
        if not bar.task_ids:
            bar.add_task("", total=progress.total_bytes)
            bar.start()
        bar.update(bar.task_ids[-1], completed=progress.done_bytes)

    try:
        yield show
    finally:
        bar.stop()
