from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_metal.monitor.engine_figures import EngineFigures, figures, parse

BEFORE = """\
# HELP vllm:num_requests_running Requests in the batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a"} 6.0
vllm:num_requests_running{model_name="b"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="a"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="a"} 0.4375
vllm:kv_cache_usage_perc{model_name="b"} 0.125
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{model_name="a"} 1000.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{model_name="a"} 250.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="a"} 5000.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="a"} 700.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{model_name="a",le="+Inf"} 100.0
vllm:iteration_tokens_total_count{model_name="a"} 100.0
vllm:iteration_tokens_total_sum{model_name="a"} 5700.0
# TYPE metal:engine_busy_seconds_total counter
metal:engine_busy_seconds_total 40.0
# TYPE metal:weights_bytes gauge
metal:weights_bytes 4.2e+09
# TYPE metal:kv_cache_bytes gauge
metal:kv_cache_bytes 1.5e+09
# TYPE metal:memory_cache_bytes gauge
metal:memory_cache_bytes 3e+08
"""
AFTER = (
    BEFORE.replace("} 1000.0", "} 2000.0")
    .replace("} 250.0", "} 1000.0")
    .replace("} 5000.0", "} 7000.0")
    .replace("} 700.0", "} 900.0")
    .replace("} 100.0", "} 150.0")
    .replace("_total 40.0", "_total 41.5")
)
NONE = dict.fromkeys(EngineFigures.__dataclass_fields__)


def test_rates_are_those_between_two_scrapes() -> None:
    assert figures(parse(AFTER, 12.0), parse(BEFORE, 10.0)) == EngineFigures(
        num_running=8,
        num_waiting=3,
        prefill_tokens_per_s=1000,
        decode_tokens_per_s=100,
        kv_usage_ratio=0.4375,
        prefix_hit_ratio=0.75,
        step_time_s=0.03,
        busy_ratio=0.75,
        weights_bytes=4_200_000_000,
        kv_bytes=1_500_000_000,
        cache_bytes=300_000_000,
    )


@pytest.mark.parametrize("before", [None, parse("", 1.0), parse(AFTER, 11.0)])
def test_without_an_earlier_scrape_or_after_a_restart_there_are_no_rates(before: object) -> None:
    found = figures(parse(BEFORE, 12.0), before)
    assert (found.num_running, found.kv_usage_ratio, found.prefix_hit_ratio) == (8, 0.4375, 0.25)
    assert found.prefill_tokens_per_s is found.decode_tokens_per_s is found.step_time_s is None
    assert found.busy_ratio is None


def test_nothing_happened_in_between() -> None:
    found = figures(parse(BEFORE, 12.0), parse(BEFORE, 10.0))
    assert (found.decode_tokens_per_s, found.busy_ratio, found.step_time_s) == (0, 0, None)
    assert found.prefix_hit_ratio == 0.25
    assert figures(parse(BEFORE, 10.0), parse(BEFORE, 10.0)).decode_tokens_per_s is None


def test_series_that_are_missing_or_no_numbers_are_blank() -> None:
    text = "vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc +Inf\nother 3\n"
    assert figures(parse(text, 2.0), parse("", 1.0)) == EngineFigures(**NONE)


def test_what_prometheus_client_exports_is_read() -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Running.", ["model_name"], registry=registry).labels('a "b"\n').set(4)
    Counter("vllm:prompt_tokens", "Prompts.", registry=registry).inc(12)
    Histogram("vllm:iteration_tokens_total", "Steps.", registry=registry).observe(3)
    scrape = parse(generate_latest(registry).decode(), 0.0)
    assert scrape.values["vllm:num_requests_running"] == 4
    assert scrape.values["vllm:prompt_tokens_total"] == 12
    assert scrape.values["vllm:iteration_tokens_total_count"] == 1


@pytest.mark.parametrize("text", ["<html>", "{}", "a b c d"])
def test_another_format_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text, 0.0)
