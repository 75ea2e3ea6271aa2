"""The scheduler over random loads, with the runner played by a counter."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.rectangular_kv_cache_manager import RectangularKVCacheManager
from vllm_metal.engine.request import Request, RequestStatus
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import Scheduler
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager
from vllm_metal.engine.step_pace import StepPace

SPEC = KVCacheSpec((KVLayerGroup(2), KVLayerGroup(1, max_tokens=300)), state_bytes=10)
SLOT_SPEC = KVCacheSpec((KVLayerGroup(3),))


def make_request(name: str, num_prompt_tokens: int, max_tokens: int = 4, priority: int = 0) -> Request:
    params = SamplingParams(priority=priority)
    return Request(name, [1] * num_prompt_tokens, params, max_tokens=max_tokens, seed=0)


def make_scheduler(
    *,
    budget_bytes: int = 1 << 40,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    slots: bool = False,
    pace: StepPace | None = None,
    chunk_grain: int = 1,
) -> Scheduler:
    kv = (
        SlotKVCacheManager(SLOT_SPEC, budget_bytes, max_num_seqs=max_num_seqs, max_model_len=2048)
        if slots
        else RectangularKVCacheManager(SPEC, budget_bytes)
    )
    return Scheduler(
        kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        pace=pace or StepPace(1000.0, min_chunk=1),
        chunk_grain=chunk_grain,
    )


class Engine:
    """Steps a scheduler as the core would, `lag` steps between sampling a token and knowing it."""

    def __init__(self, scheduler: Scheduler, *, lag: int = 0) -> None:
        self.scheduler = scheduler
        self.flights: deque[list[Request]] = deque([[] for _ in range(lag)])

    def step(self) -> dict[Request, int]:
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        sampled = [request for request, n in scheduled.items() if n == request.num_remaining_tokens]
        self.scheduler.update_from_output(output)
        self.scheduler.update_from_sampling(output)
        self.flights.append(sampled)
        for request in self.flights.popleft():
            if request.status is not RequestStatus.FINISHED:
                request.token_ids.append(7)
                request.num_pending_tokens -= 1
                if request.num_output_tokens >= request.max_tokens:
                    self.scheduler.finish(request, FinishReason.LENGTH)
        return scheduled

    def has_work(self) -> bool:
        return self.scheduler.has_work() or any(self.flights)


def step(scheduler: Scheduler) -> dict[Request, int]:
    return Engine(scheduler).step()


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=8),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 700),
    spare_steps=st.integers(0, 6),
    aborts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 7)), max_size=4),
    slots=st.booleans(),
    lag=st.integers(0, 1),
    stretch=st.sampled_from([1.0, 1.25, 2.0, 1000.0]),
    chunk_grain=st.sampled_from([1, 4, 64]),
)
def test_everyone_finishes_within_the_budgets(
    sizes, max_num_seqs, max_num_batched_tokens, spare_steps, aborts, slots, lag, stretch, chunk_grain
):
    longest = max(prompt + answer for prompt, answer in sizes)
    one = 2048 * SLOT_SPEC.bytes_per_token if slots else SPEC.num_bytes(longest)
    budget = one * (1 + spare_steps)
    scheduler = make_scheduler(
        budget_bytes=budget,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        slots=slots,
        pace=StepPace(stretch, min_chunk=16),
        chunk_grain=chunk_grain,
    )
    engine = Engine(scheduler, lag=lag)
    requests = [make_request(str(i), prompt, answer) for i, (prompt, answer) in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    num_steps = 0
    while engine.has_work():
        for when, which in aborts:
            if when == num_steps and which < len(requests):
                scheduler.finish(requests[which], FinishReason.ABORT)
        scheduled = engine.step()
        if slots:
            scheduler.kv.check()
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


def test_the_shortest_prompt_goes_first_and_others_share_what_is_left():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    long, short = make_request("long", 30), make_request("short", 6)
    scheduler.add(long)
    scheduler.add(short)
    assert step(scheduler) == {short: 6, long: 10}


def test_a_late_short_prompt_does_not_wait_for_a_long_one():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    long, short = make_request("long", 3000), make_request("short", 10)
    scheduler.add(long)
    step(scheduler)
    scheduler.add(short)
    assert step(scheduler) == {short: 10, long: 6}


def test_a_long_prompt_is_not_passed_for_ever():
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=4)
    long = make_request("long", 200)
    scheduler.add(long)
    for name in range(200):
        scheduler.add(make_request(str(name), 16, max_tokens=1))
        step(scheduler)
        if long.num_output_tokens:
            return
    raise AssertionError(f"{long} has waited for 200 others")


def test_a_higher_priority_goes_first():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    low, high = make_request("low", 10, priority=1), make_request("high", 12, priority=0)
    scheduler.add(low)
    scheduler.add(high)
    assert step(scheduler) == {high: 12, low: 4}


def test_a_higher_priority_does_not_wait_for_what_a_lower_one_computes_behind_others():
    scheduler = make_scheduler(max_num_batched_tokens=200, slots=True)
    engine = Engine(scheduler)
    low, high = make_request("low", 600, priority=1), make_request("high", 600, priority=-1)
    scheduler.add(low)
    engine.step()
    scheduler.add(high)
    for number in range(2, 6):
        scheduler.add(Request(str(number), [number] * 200, SamplingParams(), max_tokens=1, seed=0))
        engine.step()
    assert high.num_output_tokens > 0
    assert low.num_computed_tokens == 200


def test_the_lowest_priority_is_preempted_first():
    scheduler = make_scheduler(budget_bytes=2 * SPEC.num_bytes(256), max_num_batched_tokens=512)
    low, high = make_request("low", 200, 20, priority=5), make_request("high", 256, 20)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(high)
    step(scheduler)
    step(scheduler)
    assert scheduler.running == [high]


def test_with_one_step_ahead_nothing_is_scheduled_past_the_last_token():
    engine = Engine(make_scheduler(), lag=1)
    request = make_request("r", 3, max_tokens=2)
    engine.scheduler.add(request)
    assert [engine.step() for _ in range(3)] == [{request: 3}, {request: 1}, {}]


def test_prefill_beside_decodes_is_held_to_the_pace():
    pace = StepPace(2.0, min_chunk=16)
    for _ in range(3):
        pace.observe(1, 0, 0.010)  # a decode step is 10 ms
        for num_tokens in (64, 128):
            pace.observe(0, num_tokens, num_tokens * 0.001)  # a prefill token 1 ms
    scheduler = make_scheduler(max_num_batched_tokens=500, pace=pace)
    short, long = make_request("short", 1, 1000), make_request("long", 1600)
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    scheduled = [step(scheduler) for _ in range(64)]
    assert all(each[short] == 1 for each in scheduled)
    prefilled = [each.get(long, 0) for each in scheduled]
    assert 64 * 10 - 160 <= sum(prefilled) <= 64 * 10 + 16
    assert min(n for n in prefilled if n) >= 16


def test_what_others_leave_of_a_step_begins_no_prompt_if_it_is_less_than_a_chunk():
    scheduler = make_scheduler(max_num_batched_tokens=100, pace=StepPace(1000.0, min_chunk=32))
    short, middle, long = (make_request(name, size) for name, size in (("s", 30), ("m", 50), ("l", 200)))
    for request in (short, middle, long):
        scheduler.add(request)
    assert step(scheduler) == {short: 30, middle: 50}
    assert step(scheduler)[long] == 98


@given(lengths=st.lists(st.integers(2, 1500), min_size=1, max_size=6), budget=st.integers(40, 700))
def test_where_shapes_are_dear_what_is_cut_off_a_prompt_comes_in_few(lengths, budget):
    scheduler = make_scheduler(
        max_num_batched_tokens=budget, slots=True, pace=StepPace(1000.0, min_chunk=32), chunk_grain=64
    )
    engine = Engine(scheduler)
    for number, length in enumerate(lengths):
        scheduler.add(make_request(str(number), length))
    while engine.has_work():
        for request, num_tokens in engine.step().items():
            end = request.num_computed_tokens
            if num_tokens >= 64 and end < request.num_prompt_tokens:
                assert num_tokens.bit_count() == 1
                assert end % num_tokens == 0
            if num_tokens >= 64:
                assert (end - num_tokens) % 64 == 0


def test_where_shapes_are_dear_what_others_leave_of_a_step_only_finishes_prompts():
    scheduler = make_scheduler(
        max_num_batched_tokens=200, pace=StepPace(1000.0, min_chunk=32), chunk_grain=64
    )
    short, middle, long = (make_request(name, size) for name, size in (("s", 30), ("m", 50), ("l", 300)))
    for request in (short, middle, long):
        scheduler.add(request)
    assert step(scheduler) == {short: 30, middle: 50}
    assert step(scheduler) == {short: 1, middle: 1, long: 128}


def test_the_newest_is_preempted_and_is_next_again():
    budget = 2 * SPEC.num_bytes(256)
    scheduler = make_scheduler(budget_bytes=budget, max_num_batched_tokens=512)
    old, new, waiting = make_request("old", 255, 20), make_request("new", 200, 20), make_request("w", 5)
    for request in (old, new, waiting):
        scheduler.add(request)
        step(scheduler)
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert scheduler.running == [old]
    assert set(scheduler.waiting) == {new, waiting}
    assert new.num_computed_tokens == 0
    assert new.num_output_tokens > 0


def test_a_preempted_request_is_dropped_by_the_runner_in_the_same_step():
    scheduler = make_scheduler(budget_bytes=2 * SPEC.num_bytes(256), max_num_batched_tokens=512)
    old, new = make_request("old", 255, 20), make_request("new", 200, 20)
    scheduler.add(old)
    step(scheduler)
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
