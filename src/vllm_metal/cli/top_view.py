"""How `metal top` looks: one line a figure, cut off where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from vllm_metal.hub.disk import format_bytes
from vllm_metal.monitor.engine_figures import EngineFigures
from vllm_metal.monitor.host import Host
from vllm_metal.monitor.reading import FrequencyShare, GpuReading, StateShare
from vllm_metal.monitor.snapshot import Snapshot
from vllm_metal.monitor.verdict import format_power

_LABEL_WIDTH = 13
_MAX_BAR_WIDTH = 40
# What was used for less is not worth a line.
_LEAST_RATIO = 0.005
# With more, what a Mac tells under load would not fit a terminal of 24 lines.
_MAX_NUM_FREQUENCIES = 3
_UNKNOWN = "–"
_STYLES = {
    "loaded": "bold green",
    "busy": "green",
    "idle": "bold",
    "suspicious": "bold yellow",
    "unknown": "bold",
}


def render(snapshot: Snapshot, width: int, *, with_details: bool = False) -> RenderableType:
    """The whole screen; `with_details` explains the verdict, and shows every frequency that was used."""
    bar_width = max(1, min(_MAX_BAR_WIDTH, width - _LABEL_WIDTH - 10))
    verdict = snapshot.verdict
    machine = _machine(snapshot)
    parts: list[RenderableType] = [_line(machine, "dim")] if machine else []
    parts.append(Text(verdict.summary, _STYLES[verdict.kind]))
    if with_details:
        parts += [Padding(Text(detail), (0, 0, 0, 2), expand=False) for detail in verdict.details]
    sections = {
        "GPU": _gpu(snapshot.gpu, bar_width, None if with_details else _MAX_NUM_FREQUENCIES),
        "Memory": _memory(snapshot.gpu, snapshot.host, snapshot.engine),
        f"Engine at {snapshot.engine_url}": [
            *_models(snapshot.models),
            *_engine(snapshot.engine, snapshot.engine_problem, bar_width),
        ],
    }
    for title, rows in sections.items():
        lines = [_line(f"{label:<{_LABEL_WIDTH}}{value}") for label, value in rows]
        parts += [_line(title, "bold"), *lines] if lines else []
    return Group(*parts)


def _machine(snapshot: Snapshot) -> str:
    gpu, host = snapshot.gpu, snapshot.host
    parts: list[str | None] = []
    if gpu:
        parts += [gpu.chip or gpu.machine, f"{gpu.core_count} GPU cores" if gpu.core_count else None]
    elif host:
        parts.append(host.chip)
    if host and host.macos_version:
        parts.append(f"macOS {'.'.join(map(str, host.macos_version))}")
    if gpu:
        parts.append(f"read by {gpu.source}")
    return " · ".join(filter(None, parts))


def _gpu(gpu: GpuReading | None, bar_width: int, num_frequencies: int | None) -> Iterator[tuple[str, str]]:
    if gpu is None:
        return
    if gpu.active_ratio is not None:
        yield "active", _bar(gpu.active_ratio, bar_width)
    elif gpu.utilization_ratio is not None:
        yield "utilised", _bar(gpu.utilization_ratio, bar_width)
    if gpu.active_frequency_mhz is not None:
        top = gpu.top_frequency_mhz
        yield "frequency", f"{gpu.active_frequency_mhz:.0f} MHz" + (f", at most {top:.0f}" if top else "")
    for share in _longest(gpu.frequencies, num_frequencies):
        yield f"{share.frequency_mhz:>6.0f} MHz", _bar(share.ratio, bar_width)
    if gpu.power_mw is not None:
        whole = gpu.combined_power_mw
        and_others = "" if whole is None else f", with CPU and ANE {format_power(whole)}"
        yield "power", format_power(gpu.power_mw) + and_others
    if requested := _states(gpu.requested) or _frequency_list(gpu.requested_frequencies):
        yield "asked for", requested
    if granted := _states(gpu.granted):
        yield "granted", granted
    if gpu.temperature_celsius is not None:
        yield "temperature", f"{gpu.temperature_celsius:.0f} °C"
    if gpu.thermal_pressure is not None:
        yield "thermal", gpu.thermal_pressure


def _memory(
    gpu: GpuReading | None, host: Host | None, engine: EngineFigures | None
) -> Iterator[tuple[str, str]]:
    if engine:
        yield (
            "model",
            f"weights {_bytes(engine.weights_bytes)}, KV {_bytes(engine.kv_bytes)}, "
            f"cache {_bytes(engine.cache_bytes)}",
        )
    if gpu and gpu.memory_in_use_bytes is not None:
        yield (
            "GPU",
            f"{_bytes(gpu.memory_in_use_bytes)} in use, {_bytes(gpu.memory_allocated_bytes)} allocated",
        )
    if host:
        words = f"{_bytes(host.memory_available_bytes)} of {_bytes(host.memory_bytes)} available"
        wired = "" if host.memory_wired_bytes is None else f", wired {_bytes(host.memory_wired_bytes)}"
        yield "system", f"{words}{wired}, swap {_bytes(host.swap_used_bytes)}"
        if host.pressure:
            yield "pressure", host.pressure


def _models(models: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """One line, however many there are; those that only could be loaded are left out."""
    shown = [
        f"{each['name']} {_bytes(each['size_bytes']) if each['status'] == 'ok' else each['status']}"
        for each in models
        if each["status"] != "unloaded"
    ]
    if shown:
        yield "models", " · ".join(shown)


def _engine(engine: EngineFigures | None, problem: str | None, bar_width: int) -> Iterator[tuple[str, str]]:
    if problem:
        yield "no figures", problem
    if engine is None:
        return
    yield "requests", f"{_count(engine.num_running)} running, {_count(engine.num_waiting)} waiting"
    prefill, decode = _count(engine.prefill_tokens_per_s), _count(engine.decode_tokens_per_s)
    yield "speed", f"prefill {prefill} tok/s, decode {decode} tok/s"
    step = _UNKNOWN if engine.step_time_s is None else f"{engine.step_time_s * 1000:.1f} ms"
    yield "step", f"{step}, prefix hits {_percent(engine.prefix_hit_ratio)}"
    yield "KV use", _bar(engine.kv_usage_ratio, bar_width)
    yield "busy", _bar(engine.busy_ratio, bar_width)


def _longest(shares: Iterable[FrequencyShare], at_most: int | None) -> list[FrequencyShare]:
    """The frequencies that took most of the time, in the order of the source."""
    used = [(place, share) for place, share in enumerate(shares) if share.ratio >= _LEAST_RATIO]
    longest = sorted(used, key=lambda each: -each[1].ratio)[:at_most]
    return [share for _, share in sorted(longest, key=lambda each: each[0])]


def _states(shares: Iterable[StateShare]) -> str:
    return "  ".join(
        f"{share.state} {_percent(share.ratio)}" for share in shares if share.ratio >= _LEAST_RATIO
    )


def _frequency_list(shares: Iterable[FrequencyShare]) -> str:
    return _states(StateShare(f"{share.frequency_mhz:.0f} MHz", share.ratio) for share in shares)


def _bar(ratio: float | None, width: int) -> str:
    if ratio is None:
        return _UNKNOWN
    filled = round(min(ratio, 1.0) * width)
    return f"{'█' * filled}{'░' * (width - filled)} {_percent(ratio):>4}"


def _percent(ratio: float | None) -> str:
    return _UNKNOWN if ratio is None else f"{ratio:.0%}"


def _count(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}"


def _bytes(num_bytes: int | None) -> str:
    return _UNKNOWN if num_bytes is None else format_bytes(num_bytes)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
