"""An engine's figures as a table to read and as JSON to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from vllm_metal.bench.engine import Figures, Result
from vllm_metal.bench.machine import machine, versions

_COLUMNS = ("batch", "run", "step ms", "p99 ms", "out tok/s", "prefill tok/s", "busy", "CPU s")
_WIDTHS = (5, 24, 9, 9, 10, 14, 6, 8)
_DIGITS = (2, 2, 1, 1, 2, 2)
_RATIO_DIGITS = 6 * (3,)


def table(results: Sequence[Result]) -> str:
    """Medians; in the ratios above 1 is faster, or cheaper."""
    lines = [_line(_COLUMNS)]
    for result in results:
        for name, figures in result.medians.items():
            lines.append(_line((str(result.work.batch), name, *_cells(figures, _DIGITS))))
        for (name, other), ratio in result.ratios.items():
            lines.append(_line(("", f"{name} / {other}", *_cells(ratio, _RATIO_DIGITS))))
    return "\n".join(lines)


def result(
    *, command: str, model: str, settings: Mapping[str, Any], results: Sequence[Result]
) -> dict[str, Any]:
    """JSON: how it was measured, `settings` among it, and for each batch medians, ratios and every round."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "model": model,
        "settings": dict(settings),
        "results": [
            {
                **asdict(each.work),
                "medians": _by_name(each.medians),
                "ratios": _by_name({" / ".join(pair): ratio for pair, ratio in each.ratios.items()}),
                "rounds": [_by_name(figures) for figures in each.rounds],
            }
            for each in results
        ],
    }


def _by_name(figures: Mapping[str, Figures]) -> dict[str, dict[str, float | None]]:
    return {name: asdict(each) for name, each in figures.items()}


def _cells(figures: Figures, digits: Sequence[int]) -> list[str]:
    values = asdict(figures).values()
    return [
        "-" if value is None else f"{value:.{places}f}" for value, places in zip(values, digits, strict=True)
    ]


def _line(cells: Sequence[str]) -> str:
    padded = [
        cell.ljust(width) if i == 1 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return "  ".join(padded).rstrip()
