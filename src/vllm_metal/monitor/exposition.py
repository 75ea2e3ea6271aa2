"""The figures of `/metrics`, in Prometheus's format: the engine's by vLLM's names, others as `metal:`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from vllm_metal.engine.histogram import Histogram
from vllm_metal.engine.measurements import BOUNDS
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.engine.outputs import EngineStats, FinishReason
from vllm_metal.monitor.machine import Machine

#: Whatever else a scraper would take: in OpenMetrics the client library has no colons in names.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_HISTOGRAMS: Mapping[str, str] = {
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Time from a token to the next.",
    "request_time_per_output_token_seconds": "Mean time between a request's tokens.",
    "e2e_request_latency_seconds": "Time from a request's arrival to its last token.",
    "request_queue_time_seconds": "Time from a request's arrival to its first step.",
    "request_prefill_time_seconds": "Time from a request's first step to its first token.",
    "request_decode_time_seconds": "Time from a request's first token to its last.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens of a request's answer.",
    "iteration_tokens_total": "Tokens computed in an engine step.",
}
_PRESSURE_LEVELS = {"normal": 1, "warning": 2, "critical": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """`model` is None while it is not loaded."""

    model_name: str
    num_running: int
    num_waiting: int
    stats: EngineStats
    model: ModelSummary | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ServerFigures:
    models: Sequence[ModelFigures]
    machine: Machine


def render(figures: ServerFigures) -> bytes:
    """The text, of `CONTENT_TYPE`."""
    registry = CollectorRegistry(auto_describe=False)
    of_models = _merged(family for each in figures.models for family in (*_engine(each), *_model(each)))
    registry.register(_Families([*of_models, *_machine(figures.machine)]))
    return generate_latest(registry)


def _merged(families: Iterable[Metric]) -> list[Metric]:
    """One family a name, with the samples of all models."""
    merged: dict[str, Metric] = {}
    for family in families:
        if (known := merged.setdefault(family.name, family)) is not family:
            known.samples += family.samples
    return list(merged.values())


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _engine(figures: ModelFigures) -> Iterator[Metric]:
    stats, model = figures.stats, figures.model_name
    yield _gauge("vllm:num_requests_running", "Requests in steps.", figures.num_running, model)
    yield _gauge("vllm:num_requests_waiting", "Requests that wait to be.", figures.num_waiting, model)
    kv_usage = stats.kv_used_bytes / stats.kv_budget_bytes if stats.kv_budget_bytes else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV budget that is used, 0 to 1.", kv_usage, model)
    for name, meaning, count in (
        ("vllm:prompt_tokens", "Tokens of prompts that were computed.", stats.prompt_tokens),
        ("vllm:generation_tokens", "Tokens that were generated.", stats.generation_tokens),
        ("vllm:num_preemptions", "Times that a request lost its KV to others.", stats.num_preemptions),
        ("vllm:prefix_cache_queries", "Tokens looked up among kept prefixes.", stats.prefix_query_tokens),
        ("vllm:prefix_cache_hits", "Tokens found there.", stats.prefix_hit_tokens),
        ("metal:engine_busy_seconds", "Time that steps took.", stats.busy_s),
    ):
        counter = CounterMetricFamily(name, meaning, labels=["model_name"])
        counter.add_metric([model], count)
        yield counter
    ended = CounterMetricFamily(
        "vllm:request_success", "Requests that ended.", labels=["model_name", "finished_reason"]
    )
    for reason in FinishReason:
        ended.add_metric([model, reason], stats.finished.get(reason, 0))
    yield ended
    for name, meaning in _HISTOGRAMS.items():
        yield _histogram(name, meaning, figures)


def _histogram(name: str, meaning: str, figures: ModelFigures) -> Metric:
    told = figures.stats.distributions.get(name) or Histogram(BOUNDS[name]).distribution()
    bounds = told.bounds
    if name in ("request_prompt_tokens", "request_generation_tokens") and figures.max_model_len:
        bounds = bounds[: bisect_right(bounds, figures.max_model_len)]
    up_to = list(accumulate(told.counts))
    buckets = [*zip(map(floatToGoString, bounds), up_to, strict=False), ("+Inf", up_to[-1])]
    family = HistogramMetricFamily(f"vllm:{name}", meaning, labels=["model_name"])
    family.add_metric([figures.model_name], buckets, told.sum)
    return family


def _model(figures: ModelFigures) -> Iterator[Metric]:
    name = figures.model_name
    yield _gauge("metal:kv_cache_bytes", "Memory of requests' KV.", figures.stats.kv_used_bytes, name)
    if model := figures.model:
        yield _gauge("metal:weights_bytes", "Memory of the model's weights.", model.weight_bytes, name)
        yield _gauge("metal:model_load_seconds", "Time that loading the model took.", model.load_s, name)


def _machine(machine: Machine) -> Iterator[Metric]:
    if memory := machine.memory:
        yield _gauge("metal:memory_active_bytes", "Memory of MLX's arrays.", memory.active_bytes)
        yield _gauge("metal:memory_cache_bytes", "Memory that MLX keeps for reuse.", memory.cache_bytes)
        yield _gauge("metal:memory_peak_bytes", "The most memory MLX's arrays had.", memory.peak_bytes)
    if host := machine.host:
        if host.memory_wired_bytes is not None:
            meaning = "Memory that macOS keeps wired, of all programs."
            yield _gauge("metal:memory_wired_bytes", meaning, host.memory_wired_bytes)
        if host.pressure is not None:
            meaning = "macOS's memory pressure: 1 normal, 2 warning, 4 critical."
            yield _gauge("metal:memory_pressure_level", meaning, _PRESSURE_LEVELS[host.pressure])
    if gpu := machine.gpu:
        if gpu.busy_ratio is not None:
            meaning = "Share of the time that the GPU was active, 0 to 1."
            yield _gauge("metal:gpu_utilization_ratio", meaning, gpu.busy_ratio)
        if gpu.power_mw is not None:
            yield _gauge("metal:gpu_power_watts", "Power that the GPU draws.", gpu.power_mw / 1000)


def _gauge(name: str, meaning: str, value: float, model: str | None = None) -> Metric:
    gauge = GaugeMetricFamily(name, meaning, labels=[] if model is None else ["model_name"])
    gauge.add_metric([] if model is None else [model], value)
    return gauge
