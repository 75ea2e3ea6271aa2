"""What an engine measures of its requests and steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_models
from engine_driver import make_core, request, run
from vllm_metal.engine.core import EngineCore
from vllm_metal.engine.histogram import Histogram
from vllm_metal.engine.outputs import FinishReason


@given(st.lists(st.floats(-10, 10)))
def test_a_value_is_counted_at_the_first_bound_that_it_does_not_exceed(values: list[float]) -> None:
    histogram = Histogram([0.0, 1.0, 5.0])
    for value in values:
        histogram.observe(value)
    told = histogram.distribution()
    assert told.counts == (
        sum(value <= 0 for value in values),
        sum(0 < value <= 1 for value in values),
        sum(1 < value <= 5 for value in values),
        sum(value > 5 for value in values),
    )
    assert told.count == len(values)
    assert told.sum == pytest.approx(sum(values))
    assert histogram.distribution() is told


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def core(request: pytest.FixtureRequest) -> EngineCore:
    return make_core(tiny_models.make("llama"), overlap=request.param)


def counts(core: EngineCore) -> dict[str, int]:
    return {name: told.count for name, told in core.stats().distributions.items()}


def test_every_request_counts_once_and_every_step_once(core: EngineCore) -> None:
    run(core, [request(str(i), [1, 2, 3, i], max_tokens=5) for i in range(3)])
    stats = core.stats()
    found = counts(core)
    assert found.pop("iteration_tokens_total") == stats.num_steps > 4
    assert found.pop("inter_token_latency_seconds") == 3 * 4
    assert set(found.values()) == {3}
    assert stats.distributions["request_prompt_tokens"].sum == stats.prompt_tokens == 12
    assert stats.distributions["request_generation_tokens"].sum == stats.generation_tokens == 15
    assert stats.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}


def test_times_add_up(core: EngineCore) -> None:
    run(core, [request("a", [1, 2, 3], max_tokens=5)])
    total = {name: told.sum for name, told in core.stats().distributions.items()}
    assert total["e2e_request_latency_seconds"] == pytest.approx(
        total["request_queue_time_seconds"]
        + total["request_prefill_time_seconds"]
        + total["request_decode_time_seconds"]
    )
    assert total["time_to_first_token_seconds"] == pytest.approx(
        total["request_queue_time_seconds"] + total["request_prefill_time_seconds"]
    )
    assert total["inter_token_latency_seconds"] == pytest.approx(total["request_decode_time_seconds"])
    assert total["request_time_per_output_token_seconds"] == pytest.approx(
        total["request_decode_time_seconds"] / 4
    )
    assert core.stats().busy_s > 0
    assert all(value >= 0 for value in total.values())


def test_a_request_that_is_given_up_only_counts_as_ended(core: EngineCore) -> None:
    core.add_request(request("a", [1, 2, 3]))
    while not core.stats().generation_tokens:
        core.step()
    core.abort_request("a")
    core.abort_request("a")
    while core.has_work():
        core.step()
    found = counts(core)
    assert core.stats().finished[FinishReason.ABORT] == 1
    assert found["time_to_first_token_seconds"] == 1
    assert found["e2e_request_latency_seconds"] == found["request_prompt_tokens"] == 0
