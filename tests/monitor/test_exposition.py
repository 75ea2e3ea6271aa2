"""The figures of `/metrics`, without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from exposed_figures import everything
from vllm_metal.engine.outputs import EngineStats
from vllm_metal.monitor.exposition import ModelFigures, ServerFigures, render
from vllm_metal.monitor.machine import Machine

#: What dashboards and alerts of users name: none may be lost.
COUNTERS = {
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:request_success",
    "metal:engine_busy_seconds",
}
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "metal:kv_cache_bytes",
    "metal:weights_bytes",
    "metal:model_load_seconds",
    "metal:memory_active_bytes",
    "metal:memory_cache_bytes",
    "metal:memory_peak_bytes",
    "metal:memory_wired_bytes",
    "metal:memory_pressure_level",
    "metal:gpu_utilization_ratio",
    "metal:gpu_power_watts",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
}


def nothing() -> ServerFigures:
    model = ModelFigures(
        model_name="org/model",
        num_running=0,
        num_waiting=0,
        stats=EngineStats(),
        model=None,
        max_model_len=None,
    )
    return ServerFigures([model], Machine())


def parsed(of: ServerFigures) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(render(of).decode())}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels)
    return found[0]


def test_the_names_are_those_that_were_promised() -> None:
    kinds: dict[str, set[str]] = {}
    for family in parsed(everything()).values():
        kinds.setdefault(family.type, set()).add(family.name)
        assert family.documentation.endswith(".")
    assert kinds == {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}


def test_the_values() -> None:
    families = parsed(everything())
    model = {"model_name": "org/model"}
    assert value(families, "vllm:num_requests_running", **model) == 3
    assert value(families, "vllm:num_requests_waiting", **model) == 2
    assert value(families, "vllm:kv_cache_usage_perc", **model) == 0.25
    assert value(families, "vllm:prompt_tokens_total", **model) == 70
    assert value(families, "vllm:request_success_total", **model, finished_reason="stop") == 4
    assert value(families, "vllm:request_success_total", **model, finished_reason="abort") == 0
    assert value(families, "metal:engine_busy_seconds_total", **model) == 1.5
    assert value(families, "metal:memory_pressure_level") == 4
    assert value(families, "metal:gpu_utilization_ratio") == 0.75
    assert value(families, "metal:gpu_power_watts") == 21.2


def test_buckets_count_all_that_is_below_them() -> None:
    families = parsed(everything())
    bucket = "vllm:time_to_first_token_seconds_bucket"
    assert value(families, bucket, le="0.001") == 1
    assert value(families, bucket, le="0.25") == 1
    assert value(families, bucket, le="0.5") == 3
    assert value(families, bucket, le="2560.0") == 3
    assert value(families, bucket, le="+Inf") == 4
    assert value(families, "vllm:time_to_first_token_seconds_count") == 4


def test_buckets_of_tokens_end_at_the_context() -> None:
    samples = parsed(everything())["vllm:request_prompt_tokens"].samples
    bounds = [sample.labels["le"] for sample in samples if "le" in sample.labels]
    assert bounds == [
        *("1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "1000.0", "2000.0", "+Inf")
    ]


def test_before_a_model_is_loaded_the_counts_are_there_and_zero() -> None:
    families = parsed(nothing())
    assert families.keys() >= COUNTERS | HISTOGRAMS
    assert all(sample.value == 0 for family in families.values() for sample in family.samples)
    assert not [name for name in families if "memory" in name or "gpu" in name]


def test_each_model_has_its_own_series() -> None:
    one, other = everything("one"), everything("other")
    families = parsed(replace(one, models=[*one.models, *other.models]))
    for name in ("one", "other"):
        assert value(families, "vllm:num_requests_running", model_name=name) == 3
        assert value(families, "vllm:time_to_first_token_seconds_count", model_name=name) == 4
    assert value(families, "metal:memory_pressure_level") == 4


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "é/ü", ""])
def test_any_name_of_a_model_survives(name: str) -> None:
    assert value(parsed(everything(name)), "vllm:num_requests_running", model_name=name) == 3
