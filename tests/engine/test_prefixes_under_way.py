from __future__ import annotations

import pytest

from vllm_metal.engine.blocks import BLOCK_SIZE, BlockDigests
from vllm_metal.engine.prefixes_under_way import PrefixesUnderWay, Shared
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams


@pytest.fixture
def under_way():
    return PrefixesUnderWay(BlockDigests())


def make_request(*blocks: int, **params) -> Request:
    """A block of each number over and over, and a token after."""
    text = [number for number in blocks for _ in range(BLOCK_SIZE)] + [0]
    return Request("r", text, SamplingParams(**params), max_tokens=1, seed=0)


def test_one_that_begins_alike_finds_the_one_that_computes_it(under_way):
    first = make_request(1, 2, 3)
    under_way.begin(first, 0)
    assert under_way.find(make_request(1, 2, 4)) == Shared(first, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert under_way.find(make_request(5, 6)) is None
    assert under_way.find(make_request(1, 2, 4, cache_salt="mine")) is None
    under_way.end(first)
    under_way.end(first)
    assert under_way.find(make_request(1, 2, 4)) is None


def test_nobody_waits_for_one_of_lower_priority(under_way):
    low, high = make_request(1, 2, priority=1), make_request(1, 2, 3)
    under_way.begin(low, 0)
    assert under_way.find(make_request(1, 2, priority=2)) == Shared(low, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert under_way.find(high) is None
    under_way.begin(high, 0)
    under_way.end(low)
    for priority in (0, 1):
        shared = under_way.find(make_request(1, 2, priority=priority))
        assert shared == Shared(high, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE)


def test_what_was_kept_before_it_began_is_not_under_way(under_way):
    first = make_request(1, 2, 3)
    under_way.begin(first, 2 * BLOCK_SIZE)
    assert under_way.find(make_request(1, 2, 4)) is None
    assert under_way.find(make_request(1, 2, 3, 4)) == Shared(first, BLOCK_SIZE, 3 * BLOCK_SIZE)


def test_what_it_has_passed_is_under_way_no_more(under_way):
    first = make_request(1, 2, 3)
    under_way.begin(first, 0)
    under_way.end(first, 2 * BLOCK_SIZE + 5)
    assert under_way.find(make_request(1, 2, 4)) is None
    assert under_way.find(make_request(1, 2, 3)) == Shared(first, BLOCK_SIZE, 3 * BLOCK_SIZE)


def test_the_first_to_begin_is_the_one_who_computes(under_way):
    first, second = make_request(1, 2), make_request(1, 3)
    under_way.begin(first, 0)
    under_way.begin(second, 0)
    under_way.end(second)
    assert under_way.find(make_request(1)).request is first
