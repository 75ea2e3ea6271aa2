"""A run as a table to read and as JSON to keep, in the words of vLLM's benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from vllm_metal.bench.client import Target
from vllm_metal.bench.load import Load
from vllm_metal.bench.machine import machine, versions
from vllm_metal.bench.record import RequestRecord
from vllm_metal.bench.statistics import Distribution, Figures

_WIDTH = 50
# Not 1: the token that ends an answer carries no text and so comes without a chunk.
_TOKENS_PER_CHUNK_WORTH_A_NOTE = 1.05
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def table(figures: Figures, load: Load) -> str:
    lines = [
        " Serving Benchmark Result ".center(_WIDTH, "="),
        _row("Successful requests", figures.completed),
        _row("Failed requests", figures.failed),
    ]
    if load.max_concurrency is not None:
        lines.append(_row("Maximum request concurrency", load.max_concurrency))
    if load.request_rate < math.inf:
        lines.append(_row("Request rate configured (RPS)", load.request_rate))
    lines.append(_row("Benchmark duration (s)", figures.duration_s))
    if figures.total_input_tokens is not None:
        lines.append(_row("Total input tokens", figures.total_input_tokens))
    lines += [
        _row("Total generated tokens", figures.total_output_tokens),
        _row("Request throughput (req/s)", figures.request_throughput),
        _row("Output token throughput (tok/s)", figures.output_throughput),
    ]
    if figures.total_token_throughput is not None:
        lines.append(_row("Total token throughput (tok/s)", figures.total_token_throughput))
    for name, distribution in _distributions(figures).items():
        if distribution is not None:
            lines.append(_TITLES[name].center(_WIDTH, "-"))
            lines += [_row(f"{label} {name.upper()} (ms)", ms) for label, ms in _values(distribution)]
    lines.append("=" * _WIDTH)
    return "\n".join(lines + _notes(figures))


def result(
    *,
    command: str,
    load: Load,
    target: Target,
    records: Sequence[RequestRecord],
    figures: Figures,
    interrupted: bool = False,
) -> dict[str, Any]:
    """JSON: how it was measured, every figure under vLLM's name for it, and every request."""
    begin_s = min((record.started_s for record in records), default=0.0)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "base_url": target.url,
        "endpoint_type": target.endpoint_type,
        "model": target.model,
        "sampling": dict(target.sampling),
        # JSON has no infinity.
        "load": asdict(load) | ({"request_rate": "inf"} if math.isinf(load.request_rate) else {}),
        "interrupted": interrupted,
        **flat(figures),
        "requests": [_request(record, begin_s) for record in records],
    }


def flat(figures: Figures) -> dict[str, Any]:
    """Every figure, as `mean_ttft_ms`, `p99_itl_ms`, `output_throughput` …; null where not measured."""
    values: dict[str, Any] = {
        "duration": figures.duration_s,
        "completed": figures.completed,
        "failed": figures.failed,
        "total_input_tokens": figures.total_input_tokens,
        "total_output_tokens": figures.total_output_tokens,
        "token_counts": figures.token_counts,
        "tokens_per_chunk": figures.tokens_per_chunk,
        "request_throughput": figures.request_throughput,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
    }
    for name, distribution in _distributions(figures).items():
        if distribution is not None:
            values |= {f"{label.lower()}_{name}_ms": ms for label, ms in _values(distribution)}
            values[f"std_{name}_ms"] = distribution.std
    return values


def _request(record: RequestRecord, begin_s: float) -> dict[str, Any]:
    shown = {
        "started_s": round(record.started_s - begin_s, 6),
        "e2el_s": round(record.e2el_s, 6),
        "max_tokens": record.max_tokens,
        "error": record.error,
    }
    if record.error is not None:
        return shown
    return shown | {
        "ttft_s": round(record.ttft_s, 6),
        "itls_s": [round(itl_s, 6) for itl_s in record.itls_s],
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
    }


def _notes(figures: Figures) -> list[str]:
    if figures.token_counts == "chunks":
        return ["The server sent no usage: each chunk counts as one token."]
    if figures.tokens_per_chunk > _TOKENS_PER_CHUNK_WORTH_A_NOTE:
        return [f"A chunk carried {figures.tokens_per_chunk:.2f} tokens on average; ITL is between chunks."]
    return []


def _distributions(figures: Figures) -> dict[str, Distribution | None]:
    return {name: getattr(figures, f"{name}_ms") for name in _TITLES}


def _values(distribution: Distribution) -> list[tuple[str, float]]:
    return [
        ("Mean", distribution.mean),
        ("Median", distribution.median),
        *((f"P{percent:g}", value) for percent, value in distribution.percentiles.items()),
        ("Max", distribution.max),
    ]


def _row(label: str, value: float) -> str:
    text = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label + ':':<40} {text:<9}".rstrip()
