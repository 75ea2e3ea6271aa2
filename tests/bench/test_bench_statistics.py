from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.bench.record import RequestRecord
from vllm_metal.bench.statistics import figures, percentile

NUMBERS = st.lists(st.floats(0, 1e6), min_size=2)


def record(started_s: float, *arrivals_s: float, **known: object) -> RequestRecord:
    return RequestRecord(
        max_tokens=16,
        started_s=started_s,
        arrivals_s=list(arrivals_s),
        **{"finished_s": arrivals_s[-1] if arrivals_s else started_s, **known},
    )


def test_figures_computed_by_hand():
    measured = figures(
        [
            record(10.0, 10.5, 10.6, 10.9, finished_s=11.0, prompt_tokens=7, completion_tokens=5),
            record(10.0, 10.1, 10.2, finished_s=10.2, prompt_tokens=3, completion_tokens=2),
            record(10.5, finished_s=12.0, error="the server answered 500"),
        ],
        percentiles=(25, 99),
    )
    assert (measured.completed, measured.failed) == (2, 1)
    assert measured.duration_s == 2.0
    assert (measured.total_input_tokens, measured.total_output_tokens) == (10, 7)
    assert measured.token_counts == "usage"
    assert measured.tokens_per_chunk == pytest.approx(7 / 5)
    assert measured.request_throughput == 1.0
    assert measured.output_throughput == 3.5
    assert measured.total_token_throughput == 8.5
    assert measured.ttft_ms.mean == pytest.approx(300)
    assert measured.ttft_ms.std == pytest.approx(200)
    assert measured.ttft_ms.percentiles == pytest.approx({25: 200, 99: 496})
    # (1.0 - 0.5) / 4 and (0.2 - 0.1) / 1
    assert measured.tpot_ms.median == pytest.approx(112.5)
    assert measured.itl_ms.mean == pytest.approx(500 / 3)
    assert measured.itl_ms.median == pytest.approx(100)
    assert measured.itl_ms.max == pytest.approx(300)
    assert measured.e2el_ms.max == pytest.approx(1000)


def test_chunks_are_counted_where_the_server_counts_nothing():
    measured = figures([record(0.0, 1.0, 2.0), record(0.0, 1.0, completion_tokens=4, prompt_tokens=2)])
    assert measured.token_counts == "chunks"
    assert measured.total_output_tokens == 6
    assert measured.total_input_tokens is None
    assert measured.total_token_throughput is None


def test_an_answer_without_text_is_timed_by_its_end():
    measured = figures([record(1.0, finished_s=1.5, completion_tokens=1, prompt_tokens=2)])
    assert measured.ttft_ms.mean == pytest.approx(500)
    assert measured.tpot_ms is None
    assert measured.itl_ms is None


def test_nothing_measured():
    measured = figures([])
    assert (measured.completed, measured.failed, measured.output_throughput) == (0, 0, 0)
    assert measured.ttft_ms is None


@given(NUMBERS, st.floats(0, 100))
def test_percentiles_lie_between_the_extremes_and_rise(values: list[float], percent: float):
    ordered = sorted(values)
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 100) == ordered[-1]
    assert ordered[0] <= percentile(ordered, percent) <= ordered[-1] * (1 + 1e-12)
    assert percentile(ordered, percent) <= percentile(ordered, min(100, percent + 1)) * (1 + 1e-12)


@given(NUMBERS)
def test_percentiles_are_those_of_the_standard_library(values: list[float]):
    ordered = sorted(values)
    expected = statistics.quantiles(ordered, n=100, method="inclusive")
    assert [percentile(ordered, percent) for percent in range(1, 100)] == pytest.approx(expected)
