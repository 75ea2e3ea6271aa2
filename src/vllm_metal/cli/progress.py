"""Shows pulls: bars on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_metal.cli import printer
from vllm_metal.hub.disk import format_bytes
from vllm_metal.hub.progress import OnProgress, PullProgress

_LINE_EVERY_S = 2.0
_LINE_EVERY_PERCENT = 5


@contextmanager
def pull_progress(*, several: bool = False) -> Iterator[OnProgress]:
    """The callback for `hub.pull.pull`, or for `several` at once, each on a thread of its own."""
    if sys.stderr.isatty():
        with _bars(several) as show:
            yield show
    else:
        yield plain_lines()


def plain_lines(clock: Callable[[], float] = time.monotonic) -> OnProgress:
    """A line for each stage, then one at most every 5% and 2 s."""
    shown: dict[str, tuple[int, float]] = {}
    lock = threading.Lock()

    def show(progress: PullProgress) -> None:
        stage = progress.stage
        percent = progress.done_bytes * 100 // (progress.total_bytes or 1)
        with lock:
            if stage not in shown:
                shown[stage] = 0, clock()
                printer.note(stage)
                return
            shown_percent, shown_at_s = shown[stage]
            if percent - shown_percent >= _LINE_EVERY_PERCENT and clock() - shown_at_s >= _LINE_EVERY_S:
                shown[stage] = percent, clock()
                done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
                printer.note(f"{stage}: {percent}% ({done} of {total})")

    return show


@contextmanager
def _bars(several: bool) -> Iterator[OnProgress]:
    """A line for each stage, and while it counts bytes bars below; nothing before the first stage."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    columns = (
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(bar_width=15),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn(
            "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"), markup=False
        ),
    )
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    stages: set[str] = set()
    tasks: dict[tuple[str, str], TaskID] = {}
    lock = threading.Lock()

    def show(progress: PullProgress) -> None:
        # A single file is the whole.
        files = progress.files if len(progress.files) > 1 else ()
        names = {file.name for file in files}
        with lock:
            if progress.stage not in stages:
                stages.add(progress.stage)
                # Above the bars that are being drawn.
                bars.console.print(progress.stage, markup=False, highlight=False, soft_wrap=True)
            for stage, name in list(tasks):
                if stage == progress.stage and name and name not in names:
                    bars.remove_task(tasks.pop((stage, name)))
            if progress.total_bytes:
                draw(progress.stage, "", progress.done_bytes, progress.total_bytes)
            for file in files:
                draw(progress.stage, file.name, file.done_bytes, file.total_bytes)

    def draw(stage: str, name: str, done_bytes: int, total_bytes: int) -> None:
        if (stage, name) not in tasks:
            words = name.removesuffix(".safetensors") if name or not several else stage
            tasks[stage, name] = bars.add_task(words, total=total_bytes)
            bars.start()
        bars.update(tasks[stage, name], completed=done_bytes)

    try:
        yield show
    finally:
        bars.stop()
