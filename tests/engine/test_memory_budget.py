"""How models share the memory of a device."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_metal.engine.memory_budget import MemoryBudget, ModelNeed
from vllm_metal.errors import InsufficientMemory

GB = 10**9


@st.composite
def needs(draw: st.DrawFn) -> ModelNeed:
    least, useful, full = sorted(draw(st.tuples(*3 * [st.integers(0, 10**6)])))
    return ModelNeed(
        weight_bytes=draw(st.integers(0, 10**6)),
        step_bytes=draw(st.integers(0, 10**5)),
        least_kv_bytes=least,
        useful_kv_bytes=useful,
        full_kv_bytes=full,
    )


@given(models=st.lists(needs(), min_size=1, max_size=5), device_bytes=st.integers(0, 10**7))
def test_shares_are_within_the_budget_and_of_use_where_all_fit(models, device_bytes):
    budget = MemoryBudget(device_bytes, 0.9)
    shares = budget.kv_shares(models)
    taken = sum(need.weight_bytes for need in models) + max(need.step_bytes for need in models)
    assert all(share >= 0 for share in shares)
    assert sum(shares) <= max(budget.num_bytes - taken, 0)
    if budget.fits(models) and len(models) > 1:
        # A byte or so is lost to rounding.
        assert all(share >= need.useful_kv_bytes - 1 for share, need in zip(shares, models, strict=True))


@given(models=st.lists(needs(), min_size=1, max_size=5), device_bytes=st.integers(0, 10**7))
def test_a_model_that_leaves_makes_no_share_smaller(models, device_bytes):
    budget = MemoryBudget(device_bytes, 0.9)
    before, after = budget.kv_shares(models), budget.kv_shares(models[1:])
    assert all(late >= early - 1 for early, late in zip(before[1:], after, strict=True))


def test_who_is_alone_has_all_that_weights_and_steps_leave():
    need = ModelNeed(weight_bytes=3 * GB, step_bytes=GB, full_kv_bytes=GB)
    assert MemoryBudget(10 * GB, 0.5).kv_shares([need]) == [GB]
    assert MemoryBudget(20 * GB, 0.5).kv_shares([need]) == [6 * GB]


def test_where_memory_is_short_the_longer_context_gets_more():
    short = ModelNeed(useful_kv_bytes=GB, full_kv_bytes=2 * GB)
    long = ModelNeed(useful_kv_bytes=GB, full_kv_bytes=11 * GB)
    assert MemoryBudget(13 * GB, 1.0).kv_shares([short, long]) == [2 * GB, 11 * GB]
    share, other = MemoryBudget(7_500_000_000, 1.0).kv_shares([short, long])
    assert (share, other) == (1_500_000_000, 6 * GB)


def test_who_keeps_no_kv_gets_none():
    embedder = ModelNeed(weight_bytes=GB)
    chat = ModelNeed(weight_bytes=GB, useful_kv_bytes=GB, full_kv_bytes=2 * GB)
    assert MemoryBudget(10 * GB, 1.0).kv_shares([embedder, chat]) == [0, 8 * GB]


def test_a_cramped_model_may_be_loaded_alone_and_not_beside_others():
    need = ModelNeed(weight_bytes=4 * GB, least_kv_bytes=GB // 100, useful_kv_bytes=2 * GB)
    budget = MemoryBudget(10 * GB, 0.5)
    budget.require("large", need)
    assert budget.fits([need])
    assert not budget.fits([need, ModelNeed()])


@given(weights=st.integers(10**8, 10**11), pinned=st.integers(0, 10**10), percent=st.integers(1, 100))
def test_the_value_that_is_advised_works(weights, pinned, percent):
    device_bytes = 64 * GB
    need, held = ModelNeed(weight_bytes=weights), [ModelNeed(weight_bytes=pinned)] if pinned else []
    budget = MemoryBudget(device_bytes, percent / 100)
    assume(not budget.fits([need, *held]))
    with pytest.raises(InsufficientMemory) as refused:
        budget.require("x", need, held)
    assert f"`engine.gpu_memory_utilization` = {percent / 100:g} " in refused.value.message
    assert ("pinned" in refused.value.message) == bool(pinned)
    if advised := re.search(r"utilization` to (\S+) or more", refused.value.hint):
        MemoryBudget(device_bytes, float(advised[1])).require("x", need, held)
        assert float(advised[1]) > percent / 100
    else:
        with pytest.raises(InsufficientMemory):
            MemoryBudget(device_bytes, 1.0).require("x", need, held)
