"""A run as one SVG file: how its latencies are distributed, and tokens a second over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from vllm_metal.bench.record import RequestRecord

_WIDTH, _HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44
_MAX_POINTS = 1000
_NUM_BINS = 60
# Chunks read at once lie no time apart, which a logarithmic axis cannot show.
_SHORTEST_MS = 0.01

_Point = tuple[float, float]


def svg(records: Sequence[RequestRecord]) -> str:
    """Of the requests that succeeded."""
    completed = [record for record in records if record.error is None]
    panels = [
        _distribution("Time to first token", [record.ttft_s for record in completed]),
        _distribution("Inter-token latency", [itl_s for record in completed for itl_s in record.itls_s]),
        _throughput(completed),
    ]
    drawn = [f'<g transform="translate({i * _WIDTH} 0)">{panel}</g>' for i, panel in enumerate(panels)]
    width = _WIDTH * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11" fill="#333">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>\n'
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to 0…1; `ticks` are the values to label."""

    position: Callable[[float], float]
    ticks: Sequence[float]


def _distribution(title: str, values_s: Sequence[float]) -> str:
    """The share of values that are at most so long."""
    ordered = sorted(max(value_s * 1000, _SHORTEST_MS) for value_s in values_s)
    if not ordered:
        return _panel(title, "ms", "share", [], _linear(1), _linear(1))
    step = max(1, len(ordered) // _MAX_POINTS)
    # Counted from the end, so that the longest is always among the points.
    ranks = range(len(ordered), 0, -step)
    points = [(ordered[rank - 1], rank / len(ordered)) for rank in reversed(ranks)]
    return _panel(title, "ms", "share", points, _logarithmic(ordered[0], ordered[-1]), _linear(1))


def _throughput(records: Sequence[RequestRecord]) -> str:
    title = "Output tokens per second"
    if not records:
        return _panel(title, "s", "tok/s", [], _linear(1), _linear(1))
    begin_s = min(record.started_s for record in records)
    duration_s = max(record.finished_s for record in records) - begin_s
    bin_s = duration_s / _NUM_BINS or 1.0
    tokens = [0.0] * _NUM_BINS
    for record in records:
        for arrival_s in record.arrivals_s:
            number = min(int((arrival_s - begin_s) / bin_s), _NUM_BINS - 1)
            tokens[number] += record.output_tokens / len(record.arrivals_s)
    points = [((number + 0.5) * bin_s, count / bin_s) for number, count in enumerate(tokens)]
    highest = max(rate for _, rate in points)
    return _panel(title, "s", "tok/s", points, _linear(duration_s), _linear(highest))


def _panel(
    title: str, x_unit: str, y_unit: str, points: Sequence[_Point], x_axis: _Axis, y_axis: _Axis
) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + x_axis.position(value) * (right - _LEFT)

    def y(value: float) -> float:
        return bottom - y_axis.position(value) * (bottom - _TOP)

    parts = [f'<text x="{_LEFT}" y="22" font-size="13" font-weight="bold">{escape(title)}</text>']
    for tick in x_axis.ticks:
        parts.append(f'<path d="M{x(tick):.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in y_axis.ticks:
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 34}" text-anchor="end">{escape(x_unit)}</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="{_TOP - 8}" text-anchor="end">{escape(y_unit)}</text>')
    if points:
        line = " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="1.5"/>')
    else:
        parts.append(f'<text x="{_LEFT + 12}" y="{_TOP + 24}">nothing was measured</text>')
    return "".join(parts)


def _linear(highest: float) -> _Axis:
    """From 0 to at least `highest`, with about five round ticks."""
    step = 10 ** math.floor(math.log10(highest / 2)) if highest > 0 else 1.0
    while highest / step > 5:
        step *= 2
    end = step * max(1, math.ceil(highest / step))
    ticks = [round(step * number, 12) for number in range(round(end / step) + 1)]
    return _Axis(lambda value: value / end, ticks)


def _logarithmic(lowest: float, highest: float) -> _Axis:
    """Over whole powers of ten."""
    first = math.floor(math.log10(lowest))
    last = max(math.ceil(math.log10(highest)), first + 1)
    ticks = [10.0**power for power in range(first, last + 1)]
    return _Axis(lambda value: (math.log10(value) - first) / (last - first), ticks)
