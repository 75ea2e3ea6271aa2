"""The scheduler over random loads, with the runner played by a counter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.engine.kv_cache_manager import KVCacheManager, KVCacheSpec, KVLayerGroup
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.request import Request, RequestStatus
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import Scheduler

SPEC = KVCacheSpec((KVLayerGroup(2), KVLayerGroup(1, max_tokens=300)), state_bytes=10)


def make_request(name: str, num_prompt_tokens: int, max_tokens: int = 4) -> Request:
    return Request(name, [1] * num_prompt_tokens, SamplingParams(), max_tokens=max_tokens, seed=0)


def make_scheduler(
    *, budget_bytes: int = 1 << 40, max_num_seqs: int = 4, max_num_batched_tokens: int = 16
) -> Scheduler:
    return Scheduler(
        KVCacheManager(SPEC, budget_bytes),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def step(scheduler: Scheduler) -> dict[Request, int]:
    """One step as the core would do it; ends requests at their max_tokens."""
    output = scheduler.schedule()
    sampled = {
        request: 7
        for request, num_tokens in output.num_scheduled_tokens.items()
        if num_tokens == request.num_remaining_tokens
    }
    scheduler.update_from_output(output, sampled)
    for request in sampled:
        if request.num_output_tokens >= request.max_tokens:
            scheduler.finish(request, FinishReason.LENGTH)
    return output.num_scheduled_tokens


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=8),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 700),
    spare_steps=st.integers(0, 6),
    aborts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 7)), max_size=4),
)
def test_everyone_finishes_within_the_budgets(
    sizes, max_num_seqs, max_num_batched_tokens, spare_steps, aborts
):
    longest = max(prompt + answer for prompt, answer in sizes)
    budget = SPEC.num_bytes(longest) * (1 + spare_steps)
    scheduler = make_scheduler(
        budget_bytes=budget, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    requests = [make_request(str(i), prompt, answer) for i, (prompt, answer) in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    num_steps = 0
    while scheduler.has_work():
        for when, which in aborts:
            if when == num_steps and which < len(requests):
                scheduler.finish(requests[which], FinishReason.ABORT)
        scheduled = step(scheduler)
        assert sum(scheduled.values()) <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= max_num_seqs
        assert scheduler.kv.used_bytes <= budget
        num_steps += 1
        assert num_steps < 50_000
    for request in requests:
        assert request.status is RequestStatus.FINISHED
        assert request.finish_reason is FinishReason.ABORT or request.num_output_tokens == request.max_tokens
    assert scheduler.kv.used_bytes == 0


def test_running_requests_decode_while_a_prompt_is_prefilled_in_chunks():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    short, long = make_request("short", 3, 50), make_request("long", 40)
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    assert step(scheduler) == {short: 1, long: 15}
    assert step(scheduler) == {short: 1, long: 15}
    assert step(scheduler) == {short: 1, long: 10}
    assert step(scheduler) == {short: 1, long: 1}


def test_several_prompts_share_a_step():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    first, second = make_request("first", 6), make_request("second", 30)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == {first: 6, second: 10}


def test_the_newest_is_preempted_and_is_next_again():
    budget = 2 * SPEC.num_bytes(256)
    scheduler = make_scheduler(budget_bytes=budget, max_num_batched_tokens=512)
    old, new, waiting = make_request("old", 255, 20), make_request("new", 200, 20), make_request("w", 5)
    for request in (old, new, waiting):
        scheduler.add(request)
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [new, waiting]
    assert new.num_computed_tokens == 0
    assert new.num_output_tokens > 0


def test_a_preempted_request_is_dropped_by_the_runner_in_the_same_step():
    scheduler = make_scheduler(budget_bytes=2 * SPEC.num_bytes(256), max_num_batched_tokens=512)
    old, new = make_request("old", 256, 20), make_request("new", 200, 20)
    scheduler.add(old)
    scheduler.add(new)
    step(scheduler)
    output = scheduler.schedule()
    assert output.dropped == [new]
    assert output.num_scheduled_tokens == {old: 1}


def test_finishing_twice_is_harmless():
    scheduler = make_scheduler()
    request = make_request("r", 3)
    scheduler.add(request)
    scheduler.finish(request, FinishReason.ABORT)
    scheduler.finish(request, FinishReason.LENGTH)
    assert request.finish_reason is FinishReason.ABORT
    assert not scheduler.has_work()
