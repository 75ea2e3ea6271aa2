"""From the records of a run to its figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_metal.bench.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one quantity, in its own unit. `percentiles` maps each asked one to its value."""

    mean: float
    median: float
    std: float
    max: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that succeeded; distributions are in milliseconds, None where nothing was measured.

    `token_counts` says who counted the output: the server, or we, a token a chunk. Where chunks carry several
    tokens (`tokens_per_chunk`), the inter-token latency is that between chunks.
    """

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int | None
    total_output_tokens: int
    token_counts: Literal["usage", "chunks"]
    tokens_per_chunk: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None

    @property
    def request_throughput(self) -> float:
        return self._per_second(self.completed)

    @property
    def output_throughput(self) -> float:
        return self._per_second(self.total_output_tokens)

    @property
    def total_token_throughput(self) -> float | None:
        if self.total_input_tokens is None:
            return None
        return self._per_second(self.total_input_tokens + self.total_output_tokens)

    def _per_second(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0


def figures(records: Sequence[RequestRecord], percentiles: Sequence[float] = (99,)) -> Figures:
    """The run lasts from its first request's start to its last one's end."""
    completed = [record for record in records if record.error is None]
    duration_s = 0.0
    if records:
        duration_s = max(each.finished_s for each in records) - min(each.started_s for each in records)
    counted = all(record.completion_tokens is not None for record in completed)
    input_tokens = [record.prompt_tokens for record in completed if record.prompt_tokens is not None]
    output_tokens = sum(record.output_tokens for record in completed)
    num_chunks = sum(len(record.arrivals_s) for record in completed)
    return Figures(
        completed=len(completed),
        failed=len(records) - len(completed),
        duration_s=duration_s,
        total_input_tokens=sum(input_tokens) if len(input_tokens) == len(completed) else None,
        total_output_tokens=output_tokens,
        token_counts="usage" if counted else "chunks",
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else 0.0,
        ttft_ms=_distribution((record.ttft_s for record in completed), percentiles),
        tpot_ms=_distribution(
            (record.tpot_s for record in completed if record.tpot_s is not None), percentiles
        ),
        itl_ms=_distribution((itl_s for record in completed for itl_s in record.itls_s), percentiles),
        e2el_ms=_distribution((record.e2el_s for record in completed), percentiles),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, interpolated between the two nearest ranks."""
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def _distribution(values_s: Iterable[float], percentiles: Sequence[float]) -> Distribution | None:
    ordered = sorted(value_s * 1000 for value_s in values_s)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        mean=mean,
        median=percentile(ordered, 50),
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        max=ordered[-1],
        percentiles={percent: percentile(ordered, percent) for percent in percentiles},
    )
