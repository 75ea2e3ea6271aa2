"""EmbeddingQueue: what is computed together, in what order, and that nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.engine.embedding_queue import EmbeddingQueue, padded_length
from vllm_metal.engine.embedding_request import EmbeddingInput, EmbeddingRequest


def request(name: str, *lengths: int) -> EmbeddingRequest:
    return EmbeddingRequest(name, [EmbeddingInput([1] * length) for length in lengths])


def places(queue: EmbeddingQueue, max_tokens: int) -> list[tuple[str, int]]:
    return [(row.request.request_id, row.position) for row in queue.take(max_tokens)]


@given(st.integers(1, 100_000))
def test_padding_is_at_most_a_quarter_or_a_few_tokens(num_tokens):
    padded = padded_length(num_tokens)
    assert num_tokens <= padded <= max(num_tokens * 5 / 4, num_tokens + 7)


def test_there_are_few_lengths():
    assert len({padded_length(num_tokens) for num_tokens in range(1, 8193)}) < 50


def test_the_request_with_the_least_left_comes_first():
    queue = EmbeddingQueue()
    queue.add(request("long", *[100] * 50))
    queue.add(request("short", 10))
    assert places(queue, 16) == [("short", 0)]


def test_inputs_of_one_length_are_taken_together_whosever_they_are():
    queue = EmbeddingQueue()
    queue.add(request("first", 10, 100))
    queue.add(request("second", 100, 12))
    assert places(queue, 64) == [("first", 0), ("second", 1)]
    assert places(queue, 1000) == [("first", 1), ("second", 0)]


def test_a_batch_keeps_to_its_tokens():
    queue = EmbeddingQueue()
    queue.add(request("only", *[16] * 10))
    assert places(queue, 64) == [("only", 0), ("only", 1), ("only", 2), ("only", 3)]


def test_an_input_that_is_longer_than_a_batch_is_one():
    queue = EmbeddingQueue()
    queue.add(request("only", 500, 500))
    assert places(queue, 64) == [("only", 0)]


def test_a_request_that_is_discarded_is_taken_no_more():
    queue = EmbeddingQueue()
    queue.add(request("left", 10, 10))
    queue.discard("left")
    assert len(queue) == 0
    assert places(queue, 64) == []


def test_a_long_request_is_not_overtaken_for_ever():
    queue = EmbeddingQueue()
    queue.add(request("long", *[64] * 4))
    for number in range(1000):
        queue.add(request(f"short {number}", 8))
        if places(queue, 8)[0][0] == "long":
            break
    else:
        pytest.fail("a thousand requests went before")


@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 512),
)
def test_every_input_is_taken_once(lengths, max_tokens):
    queue = EmbeddingQueue()
    for number, each in enumerate(lengths):
        queue.add(request(str(number), *each))
    taken = []
    while len(queue):
        rows = places(queue, max_tokens)
        assert rows
        taken += rows
    wanted = [(str(number), position) for number, each in enumerate(lengths) for position in range(len(each))]
    assert sorted(taken) == sorted(wanted)


def test_a_request_is_not_overtaken_by_itself():
    queue = EmbeddingQueue()
    queue.add(request("long", *[8] * 100))
    for _ in range(9):
        queue.take(80)
    queue.add(request("short", 1))
    assert places(queue, 8) == [("short", 0)]
