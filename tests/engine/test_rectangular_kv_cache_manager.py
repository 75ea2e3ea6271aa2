from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.engine.blocks import BLOCK_SIZE
from vllm_metal.engine.kv_cache_manager import PREFIX_SHARE, KVCacheSpec, KVLayerGroup
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.rectangular_kv_cache_manager import (
    Drop,
    Free,
    RectangularKVCacheManager,
    Restore,
    Store,
)
from vllm_metal.engine.request import Request, RequestStatus
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import Scheduler
from vllm_metal.engine.step_pace import StepPace

SPEC = KVCacheSpec((KVLayerGroup(2), KVLayerGroup(1, max_tokens=100)), state_bytes=500)


def make_request(token_ids: list[int], max_tokens: int = 1, **params) -> Request:
    return Request("r", token_ids, SamplingParams(**params), max_tokens=max_tokens, seed=0)


def text(*blocks: int, tail: int = 1) -> list[int]:
    """A block of each number over and over, and a few tokens after."""
    return [number for number in blocks for _ in range(BLOCK_SIZE)] + [0] * tail


class Engine:
    """Steps a scheduler as the core would, over states that are the texts they have seen.

    `lag` is how many steps lie between sampling a token and knowing it.
    """

    def __init__(self, budget_bytes: int, *, max_num_batched_tokens: int = 4096, lag: int = 0) -> None:
        self.kv = RectangularKVCacheManager(SPEC, budget_bytes)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=4,
            max_num_batched_tokens=max_num_batched_tokens,
            pace=StepPace(1000.0, min_chunk=1),
        )
        self.states: dict[Request, list[int]] = {}
        self.snapshots: dict[int, tuple[str | None, list[int]]] = {}
        self.flights: deque[list[Request]] = deque([[] for _ in range(lag)])
        self.num_computed_tokens = 0

    def step(self) -> None:
        output = self.scheduler.schedule()
        self._apply()
        sampled = []
        for request, num_tokens in output.num_scheduled_tokens.items():
            assert num_tokens > 0
            self.num_computed_tokens += num_tokens
            state = self.states.setdefault(request, [])
            assert len(state) == request.num_computed_tokens
            # A token that is not known yet is the same that will be.
            padded = request.token_ids + [7] * request.num_pending_tokens
            state += padded[len(state) : len(state) + num_tokens]
            if num_tokens == request.num_remaining_tokens:
                sampled.append(request)
        self.scheduler.update_from_output(output)
        self.scheduler.update_from_sampling(output)
        self.flights.append(sampled)
        for request in self.flights.popleft():
            if request.status is not RequestStatus.FINISHED:
                request.token_ids.append(7)
                request.num_pending_tokens -= 1
                if request.num_output_tokens >= request.max_tokens:
                    self.scheduler.finish(request, FinishReason.LENGTH)
        self.kv.check()
        assert self.kv.snapshots.num_bytes <= PREFIX_SHARE * self.kv.budget_bytes

    def _apply(self) -> None:
        for change in self.kv.take_changes():
            match change:
                case Store(snapshot_id, request):
                    assert snapshot_id not in self.snapshots
                    snapshot = (request.params.cache_salt, list(self.states[request]))
                    assert snapshot not in self.snapshots.values()
                    self.snapshots[snapshot_id] = snapshot
                case Restore(snapshot_id, request):
                    assert request not in self.states
                    salt, token_ids = self.snapshots[snapshot_id]
                    assert salt == request.params.cache_salt
                    assert token_ids == request.token_ids[: len(token_ids)]
                    self.states[request] = list(token_ids)
                case Free(request):
                    self.states.pop(request, None)
                case Drop(snapshot_id):
                    del self.snapshots[snapshot_id]

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work() or any(self.flights):
            self.step()

    def num_cached(self, *requests: Request) -> list[int]:
        self.run(*requests)
        return [request.num_cached_tokens for request in requests]


def test_every_row_costs_as_much_as_the_longest():
    manager = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), budget_bytes=2 * 512)
    short, long = make_request([1] * 100), make_request([1] * 512)
    assert manager.allocate(short)
    assert manager.used_bytes == 256
    assert manager.allocate(long)
    assert manager.used_bytes == 2 * 512
    long.token_ids.append(1)
    assert not manager.allocate(long)
    assert manager.used_bytes == 2 * 512
    manager.free(long)
    manager.free(long)
    assert manager.used_bytes == 256


def test_a_refused_newcomer_holds_nothing():
    manager = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), budget_bytes=256)
    assert not manager.allocate(make_request([1] * 257))
    assert manager.used_bytes == 0


def test_a_smaller_budget_takes_snapshots_first_and_nothing_of_requests():
    engine = Engine(1 << 20)
    engine.run(make_request(text(1, 2, 3)))
    manager = engine.kv
    running = make_request([7] * 100)
    assert manager.allocate(running)
    assert manager.snapshots.num_bytes > 0
    manager.set_budget(0)
    manager.check()
    assert manager.snapshots.num_bytes == 0
    assert manager.budget_bytes == manager.used_bytes == manager.num_bytes(100)
    assert not manager.allocate(make_request([1]))
    manager.set_budget(1 << 20)
    assert manager.allocate(make_request([1]))


def test_max_num_tokens_is_what_one_request_can_hold():
    manager = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), budget_bytes=1000)
    assert manager.max_num_tokens(10_000, manager.budget_bytes) == 768
    assert manager.max_num_tokens(100, manager.budget_bytes) == 100


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_is_kept_short_of_what_asks_for_the_answer(lag):
    engine = Engine(1 << 30, lag=lag)
    prompt = text(1, 2, 3, tail=20)
    assert engine.num_cached(make_request(prompt)) == [0]
    assert engine.num_cached(make_request(prompt)) == [3 * BLOCK_SIZE]
    assert engine.num_cached(make_request(prompt[:-16] + [9] * 50)) == [3 * BLOCK_SIZE]


@pytest.mark.parametrize("lag", [0, 1])
def test_each_turn_goes_on_from_the_answer_before(lag):
    engine = Engine(1 << 30, lag=lag)
    prompt: list[int] = []
    expected = 0
    for turn in range(6):
        prompt += [turn + 10] * 40
        request = make_request(list(prompt), max_tokens=50)
        assert engine.num_cached(request) == [expected]
        # The last token is sampled, and not computed.
        expected = request.num_tokens - 1
        prompt = request.token_ids


def test_where_two_texts_parted_is_kept_when_the_second_passes():
    engine = Engine(1 << 30)
    system = list(range(100, 100 + 3 * BLOCK_SIZE + 10))
    prompts = [system + [number] * 500 for number in range(3)]
    assert [engine.num_cached(make_request(prompt))[0] for prompt in prompts] == [0, 0, 3 * BLOCK_SIZE]


@pytest.mark.parametrize("budget", [32, 4096])
def test_requests_of_one_prefix_compute_it_once(budget):
    """Those that come together, and one that comes while it is under way."""
    engine = Engine(1 << 30, max_num_batched_tokens=budget)
    system = list(range(100, 100 + 5 * BLOCK_SIZE + 10))
    together = [make_request(system + [number] * 100) for number in range(3)]
    late = make_request(system + [9] * 90)
    for request in together:
        engine.scheduler.add(request)
    engine.step()
    engine.run(late)
    assert sorted(request.num_cached_tokens for request in (*together, late)) == [0] + [5 * BLOCK_SIZE] * 3


def test_nobody_waits_for_what_will_not_be_kept():
    """All that may be kept is less than a state."""
    engine = Engine(2 * SPEC.num_bytes(256), max_num_batched_tokens=100)
    first, second = make_request(text(1, 2)), make_request(text(1, 2))
    engine.scheduler.add(first)
    engine.step()
    engine.scheduler.add(second)
    engine.step()
    assert second.status is RequestStatus.RUNNING
    engine.run()
    assert engine.snapshots == {}


def test_a_long_prompt_is_kept_here_and_there():
    engine = Engine(1 << 30)
    prompt = [number % 1000 for number in range(5000)]
    engine.run(make_request(prompt))
    assert engine.num_cached(make_request(prompt[:2500] + [7] * 100)) == [2048]


def test_a_long_prompt_is_kept_more_sparsely_where_memory_is_short():
    engine = Engine(4 * int(SPEC.num_bytes(5001) / PREFIX_SHARE))
    engine.run(make_request([number % 1000 for number in range(5000)]))
    assert [len(token_ids) for _, token_ids in engine.snapshots.values()] == [4096, 4928]


def test_salts_and_those_who_want_no_prefix():
    engine = Engine(1 << 30)
    prompt = text(1, 2, 3, tail=20)
    engine.run(make_request(prompt, cache_salt="mine"))
    assert engine.num_cached(make_request(prompt)) == [0]
    assert engine.num_cached(make_request(prompt, cache_salt="yours")) == [0]
    assert engine.num_cached(make_request(prompt, cache_salt="mine")) == [3 * BLOCK_SIZE]
    assert engine.num_cached(make_request(prompt, skip_reading_prefix_cache=True)) == [0]
    together = [make_request([5] * 200, cache_salt=salt) for salt in "ab"]
    assert engine.num_cached(*together) == [0, 0]


def test_the_least_recently_used_goes_first():
    prompts = [[number] * 150 for number in range(1, 4)]
    room_for_two = int(2.5 * SPEC.exact_bytes(128) / PREFIX_SHARE)
    engine = Engine(room_for_two)
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        engine.run(make_request(prompt))
    assert engine.num_cached(make_request(prompts[0])) == [128]
    assert engine.num_cached(make_request(prompts[1])) == [0]


def test_snapshots_give_way_to_requests():
    engine = Engine(4 * SPEC.num_bytes(256))
    engine.run(make_request([1] * 150))
    assert engine.kv.snapshots.num_bytes
    for number in range(2, 6):
        engine.scheduler.add(make_request([number] * 20, max_tokens=10))
    engine.step()
    assert len(engine.scheduler.running) == 4
    assert engine.kv.snapshots.num_bytes == 0


@settings(deadline=None, max_examples=80)
@given(
    waves=st.lists(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, 2), max_size=6),
                st.integers(1, 90),
                st.integers(1, 90),
                st.sampled_from([{}, {}, {"cache_salt": "a"}, {"skip_reading_prefix_cache": True}]),
                st.sampled_from([None, None, None, 0, 1, 3]),
            ),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=4,
    ),
    num_states=st.integers(1, 30),
    max_num_batched_tokens=st.integers(4, 300),
    lag=st.integers(0, 1),
)
def test_states_are_those_of_the_texts_they_are_given_to(waves, num_states, max_num_batched_tokens, lag):
    """Random loads, aborts and preemptions: budgets hold, and nothing is left behind."""
    engine = Engine(num_states * SPEC.num_bytes(512), max_num_batched_tokens=max_num_batched_tokens, lag=lag)
    for wave in waves:
        requests = [
            (make_request(text(*blocks, tail=tail)[: 512 - max_tokens], max_tokens, **params), abort)
            for blocks, tail, max_tokens, params, abort in wave
        ]
        for request, _ in requests:
            engine.scheduler.add(request)
        for num_steps in range(4):
            engine.step()
            for request, abort in requests:
                if abort == num_steps:
                    engine.scheduler.finish(request, FinishReason.ABORT)
    engine.run()
    engine.step()
    assert engine.kv.used_bytes == 0
    assert engine.states == {}
    kept = sum(SPEC.exact_bytes(len(token_ids)) for _, token_ids in engine.snapshots.values())
    assert engine.kv.snapshots.num_bytes == kept
    engine.kv.forget_prefixes()
    engine._apply()
    assert engine.snapshots == {}
