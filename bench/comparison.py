"""What both comparisons share: one measured run, and the table of two servers."""

from __future__ import annotations

import asyncio
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from servers import OURS, THEIRS, Server

from vllm_metal.bench import report
from vllm_metal.bench.client import Target
from vllm_metal.bench.load import Load
from vllm_metal.bench.record import RequestRecord
from vllm_metal.bench.run import run, warm_up
from vllm_metal.bench.statistics import figures

_PERCENTILES = (90, 99)


def measure(server: Server, load: Load, target: Target, *, limit_s: float | None = None) -> dict[str, Any]:
    """The JSON of one run, with the server's processor time; past the limit, of what had finished by then."""
    records: list[RequestRecord] = []
    cpu_before_s = server.cpu_s()

    async def main() -> None:
        nonlocal cpu_before_s
        async with asyncio.timeout(limit_s):
            await warm_up(load, target)
            cpu_before_s = server.cpu_s()
            await run(load, target, records)

    timed_out = False
    try:
        asyncio.run(main())
    except TimeoutError:
        timed_out = True
    cpu_s = server.cpu_s() - cpu_before_s
    measured = figures(records, _PERCENTILES)
    result = report.result(
        command=shlex.join(server.command), load=load, target=target, records=records, figures=measured
    )
    return result | {
        "timed_out": timed_out,
        "server_cpu_s": cpu_s,
        "output_tokens_per_cpu_s": measured.total_output_tokens / cpu_s if cpu_s else None,
    }


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of every figure that all runs have."""
    common = set.intersection(*(set(run) for run in runs))
    return {
        name: statistics.median(run[name] for run in runs)
        for name in sorted(common)
        if all(isinstance(run[name], int | float) and not isinstance(run[name], bool) for run in runs)
    }


def ratios(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    return {name: ours[name] / theirs[name] for name in ours if theirs.get(name)}


def table(ours: dict[str, float], theirs: dict[str, float], rows: Sequence[str]) -> str:
    """`rows` that were measured on either side; the ratio is ours to theirs."""
    lines = [f"{'':<28}{OURS:>14}{THEIRS:>16}{'ratio':>9}"]
    ratio = ratios(ours, theirs)
    for name in rows:
        if name in ours or name in theirs:
            cells = [_cell(ours.get(name), 14), _cell(theirs.get(name), 16), _cell(ratio.get(name), 9, 3)]
            lines.append(f"{name:<28}{''.join(cells)}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int = 1) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"
