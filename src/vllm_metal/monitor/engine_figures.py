"""What the daemon's `/metrics` says of its engine, and how fast that goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Scrape:
    """The series of one moment, by name, added up over their labels. `time_s` is of a monotonic clock.

    Of shares it is the largest.
    """

    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """None where the daemon exports no such series, or nothing happened that could be measured."""

    num_running: int | None
    num_waiting: int | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    kv_usage_ratio: float | None
    prefix_hit_ratio: float | None
    step_time_s: float | None
    busy_ratio: float | None
    weights_bytes: int | None
    kv_bytes: int | None
    cache_bytes: int | None


def parse(text: str, time_s: float) -> Scrape:
    """Raises ValueError where `text` is not Prometheus's text format."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if math.isfinite(sample.value):
                so_far = values.get(sample.name, 0.0)
                is_share = sample.name.endswith("_perc")
                values[sample.name] = max(so_far, sample.value) if is_share else so_far + sample.value
    return Scrape(time_s, values)


def figures(now: Scrape, before: Scrape | None = None) -> EngineFigures:
    """The state of `now`, and rates since `before`."""
    busy_s = _growth("metal:engine_busy_seconds_total", now, before)
    busy_ratio = _rate("metal:engine_busy_seconds_total", now, before)
    return EngineFigures(
        num_running=_whole("vllm:num_requests_running", now),
        num_waiting=_whole("vllm:num_requests_waiting", now),
        prefill_tokens_per_s=_rate("vllm:prompt_tokens_total", now, before),
        decode_tokens_per_s=_rate("vllm:generation_tokens_total", now, before),
        kv_usage_ratio=now.values.get("vllm:kv_cache_usage_perc"),
        prefix_hit_ratio=_prefix_hit_ratio(now, before),
        step_time_s=_quotient(busy_s, _growth("vllm:iteration_tokens_total_count", now, before)),
        # A step counts when it ends, with what it took before the look began.
        busy_ratio=None if busy_ratio is None else min(busy_ratio, 1.0),
        weights_bytes=_whole("metal:weights_bytes", now),
        kv_bytes=_whole("metal:kv_cache_bytes", now),
        cache_bytes=_whole("metal:memory_cache_bytes", now),
    )


def _prefix_hit_ratio(now: Scrape, before: Scrape | None) -> float | None:
    """Of the tokens looked up since `before`; if there were none, of all."""
    hits, queries = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
    recent = _quotient(_growth(hits, now, before), _growth(queries, now, before))
    return _quotient(now.values.get(hits), now.values.get(queries)) if recent is None else recent


def _rate(name: str, now: Scrape, before: Scrape | None) -> float | None:
    elapsed_s = None if before is None else now.time_s - before.time_s
    return _quotient(_growth(name, now, before), elapsed_s)


def _growth(name: str, now: Scrape, before: Scrape | None) -> float | None:
    """None too where a counter fell, since then it counts anew."""
    if before is None or name not in now.values or name not in before.values:
        return None
    growth = now.values[name] - before.values[name]
    return growth if growth >= 0 else None


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _whole(name: str, scrape: Scrape) -> int | None:
    value = scrape.values.get(name)
    return None if value is None else int(value)
