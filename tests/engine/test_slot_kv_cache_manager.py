from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.slot_kv_cache_manager import Move, Resize, Slot, SlotKVCacheManager

SPEC = KVCacheSpec((KVLayerGroup(1),))


def make_request(num_tokens: int, max_tokens: int = 1) -> Request:
    return Request("r", [1] * num_tokens, SamplingParams(), max_tokens=max_tokens, seed=0)


def make_manager(budget_bytes: int, *, max_num_seqs: int = 16, **how) -> SlotKVCacheManager:
    return SlotKVCacheManager(SPEC, budget_bytes, max_num_seqs=max_num_seqs, max_model_len=8192, **how)


class Slots(RuleBasedStateMachine):
    """Plays the runner's arrays with one owner a slot: after every change each request owns its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.owners: dict[int, list[Request | None]] = {}

    @initialize(
        budget=st.integers(8192, 200_000), compact=st.booleans(), most_packed=st.sampled_from([0, 3, 1000])
    )
    def start(self, budget, compact, most_packed):
        self.manager = make_manager(budget, compact=compact, most_packed=most_packed)

    @rule(num_tokens=st.integers(1, 8192), max_tokens=st.integers(1, 400))
    def join(self, num_tokens, max_tokens):
        request = make_request(num_tokens, max_tokens)
        if len(self.requests) < 16 and self.manager.allocate(request):
            self._apply()
            self._claim(request)
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 2000))
    def grow(self, data, num_tokens):
        request = data.draw(st.sampled_from(self.requests))
        grown = min(num_tokens, 8192 - request.num_tokens)
        request.token_ids += [1] * grown
        if not self.manager.allocate(request):
            self._leave(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        self._leave(data.draw(st.sampled_from(self.requests)))

    @rule(num_bytes=st.integers(0, 200_000))
    def set_budget(self, num_bytes):
        held = sum(self.manager.slot(request).capacity for request in self.requests)
        self.manager.set_budget(num_bytes)
        assert self.manager.budget_bytes == max(num_bytes, self.manager.used_bytes)
        assert self.manager.used_bytes <= max(num_bytes, held)

    def _leave(self, request):
        self.requests.remove(request)
        self.manager.free(request)
        self.manager.free(request)

    def _claim(self, request):
        slot = self.manager.slot(request)
        self.owners[slot.capacity][slot.row] = request

    def _apply(self):
        for change in self.manager.take_changes():
            match change:
                case Resize(capacity, num_slots):
                    old = self.owners.get(capacity, [])
                    self.owners[capacity] = (old + [None] * num_slots)[:num_slots]
                case Move(source, target):
                    self.owners[target.capacity][target.row] = self.owners[source.capacity][source.row]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "manager"):
            return
        self._apply()
        self.manager.check()
        for request in self.requests:
            slot = self.manager.slot(request)
            assert self.owners[slot.capacity][slot.row] is request
            assert request.num_tokens <= slot.capacity
        for pool in self.manager.pools.values():
            if len(pool.requests) <= self.manager.most_packed:
                assert pool.num_leading_rows == len(pool.requests)

    @rule()
    def trim(self):
        self.manager.trim()
        assert self.manager.held_bytes == self.manager.used_bytes

    @invariant()
    def at_most_one_slot_of_a_pool_waits_for_somebody_to_come(self):
        if hasattr(self, "manager"):
            assert all(pool.requests or pool.num_slots <= 1 for pool in self.manager.pools.values())
            assert self.requests or self.manager.used_bytes == 0


Slots.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
TestSlots = Slots.TestCase


def test_slots_are_as_large_as_memory_allows_many_of():
    assert min(make_manager(2 * 16 * 2048).pools) == 2048
    assert min(make_manager(2 * 16 * 2048 - 2).pools) == 1024
    assert min(make_manager(10_000).pools) == 512


def test_a_request_gets_room_for_its_answer():
    manager = make_manager(1 << 20)
    long_answer, short_answer = make_request(2000, max_tokens=500), make_request(2000, max_tokens=40)
    assert manager.allocate(long_answer)
    assert manager.allocate(short_answer)
    assert manager.slot(long_answer).capacity == 4096
    assert manager.slot(short_answer).capacity == 2048


def test_a_leaver_s_row_goes_to_the_next_who_joins():
    manager = make_manager(1 << 20)
    requests = [make_request(10) for _ in range(4)]
    assert all(map(manager.allocate, requests))
    manager.take_changes()
    manager.free(requests[1])
    assert manager.allocate(make_request(10))
    assert manager.take_changes() == []


def test_the_last_leaver_s_slot_is_held_for_the_next_who_comes():
    manager = make_manager(1 << 20)
    for _ in range(2):
        request = make_request(10)
        assert manager.allocate(request)
        manager.free(request)
    assert manager.take_changes() == [Resize(2048, 1)]
    assert manager.used_bytes == 0
    manager.trim()
    assert manager.take_changes() == [Resize(2048, 0)]


def test_a_slot_that_waits_gives_way_before_what_is_kept_and_before_what_comes():
    manager = make_manager(9000)
    kept, long = make_request(640), make_request(8000)
    assert manager.allocate(kept)
    kept.num_computed_tokens = kept.num_tokens
    manager.store(kept)
    manager.free(kept)
    assert manager.allocate(long)
    assert manager.prefixes.num_bytes == 640
    assert manager.held_bytes == 8192
    manager.free(long)
    assert manager.held_bytes == 8192
    assert manager.allocate(make_request(2000, max_tokens=1))
    assert manager.prefixes.num_bytes == 640
    assert manager.held_bytes == 2048


def test_a_slot_that_waits_gives_way_before_what_is_kept_where_a_pool_grows_by_many():
    manager = make_manager(3500)
    kept = make_request(640)
    assert manager.allocate(kept)
    kept.num_computed_tokens = kept.num_tokens
    manager.store(kept)
    manager.free(kept)
    for _ in range(3):
        assert manager.allocate(make_request(10))
    assert manager.prefixes.num_bytes == 640
    assert manager.held_bytes == 4 * 512


def test_a_smaller_budget_takes_kept_prefixes_first_and_nothing_of_requests():
    manager = make_manager(1 << 20)
    for token_id in range(8):
        gone = Request("r", [token_id] * 257, SamplingParams(), max_tokens=1, seed=0)
        assert manager.allocate(gone)
        gone.num_computed_tokens = gone.num_tokens
        manager.store(gone)
        manager.free(gone)
    running = make_request(3000)
    assert manager.allocate(running)
    slot, kept_bytes = manager.slot(running), manager.prefixes.num_bytes
    manager.set_budget(manager.used_bytes + kept_bytes // 2)
    assert 0 < manager.prefixes.num_bytes <= kept_bytes // 2
    manager.set_budget(0)
    assert manager.prefixes.num_bytes == 0
    assert manager.slot(running)._replace(row=0) == slot._replace(row=0)
    assert manager.budget_bytes == manager.used_bytes == manager.num_bytes(3000)
    assert not manager.allocate(make_request(10))
    manager.set_budget(1 << 20)
    assert manager.allocate(make_request(10))


def test_compact_slots_begin_small():
    assert min(make_manager(1 << 30, compact=True).pools) == 512


@pytest.mark.parametrize(("most_packed", "moves"), [(3, [Move(Slot(512, 3), Slot(512, 1))]), (2, [])])
def test_in_a_small_pool_a_leaver_s_row_is_filled_by_the_last_with_one_move(most_packed, moves):
    manager = make_manager(1 << 20, compact=True, most_packed=most_packed)
    requests = [make_request(10) for _ in range(4)]
    assert all(map(manager.allocate, requests))
    manager.take_changes()
    manager.free(requests[1])
    assert manager.take_changes() == moves
    assert manager.slot(requests[3]).row == (1 if moves else 3)


def test_growth_is_amortized():
    manager = make_manager(1 << 30, max_num_seqs=64)
    for _ in range(64):
        assert manager.allocate(make_request(10))
    resizes = [change for change in manager.take_changes() if isinstance(change, Resize)]
    assert len(resizes) <= 9
    assert resizes[-1].num_slots == 64


def test_where_headroom_does_not_fit_a_request_goes_without():
    manager = make_manager(2048)
    assert manager.allocate(make_request(2000, max_tokens=500))


def test_the_longest_request_is_the_largest_slot_that_fits():
    assert make_manager(1).max_num_tokens(100_000, 5000) == 4096
    assert make_manager(1).max_num_tokens(1000, 5000) == 1000
    assert make_manager(1).max_num_tokens(1000, 100) == 0


def test_one_waits_for_another_that_computes_the_same_unless_that_takes_long():
    manager = make_manager(1 << 30)
    first = make_request(640)
    manager.allocate(first)
    manager.restore(first)
    assert manager.is_worth_waiting(make_request(640))
    little = Request("r", [1] * 64 + [2] * 100, SamplingParams(), max_tokens=1, seed=0)
    assert not manager.is_worth_waiting(little)
    assert not manager.is_worth_waiting(
        Request("r", [1] * 640, SamplingParams(skip_reading_prefix_cache=True), max_tokens=1, seed=0)
    )
