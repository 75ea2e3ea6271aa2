from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.engine.blocks import BLOCK_SIZE
from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.prefix_cache import PrefixCache
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.slot_kv_cache_manager import Drop, Move, Resize, Restore, SlotKVCacheManager, Store


def make_request(token_ids: list[int], **params) -> Request:
    return Request("r", token_ids, SamplingParams(**params), max_tokens=1, seed=0)


def text(*blocks: int, tail: int = 1) -> list[int]:
    """A block of each number over and over, and a few tokens after."""
    return [number for number in blocks for _ in range(BLOCK_SIZE)] + [0] * tail


def store(cache: PrefixCache, token_ids: list[int], **params):
    return cache.store(make_request(token_ids, **params), len(token_ids))


def num_matched(cache: PrefixCache, token_ids: list[int], **params) -> int:
    return sum(span.num_tokens for span in cache.match(make_request(token_ids, **params))) // BLOCK_SIZE


def test_a_text_matches_as_far_as_it_is_the_same():
    cache = PrefixCache(1)
    store(cache, text(1, 2, 3))
    assert num_matched(cache, text(1, 2, 3, 4)) == 3
    assert num_matched(cache, text(1, 2, 5)) == 2
    assert num_matched(cache, text(2, 2, 3)) == 0


def test_the_last_token_is_always_computed():
    cache = PrefixCache(1)
    store(cache, text(1, 2))
    assert num_matched(cache, text(1, 2, tail=0)) == 1
    assert num_matched(cache, text(1, 2, tail=1)) == 2


@pytest.mark.parametrize("length", [64, 65, 66, 127, 128, 129, 130, 200, 4100])
def test_of_the_same_prompt_all_but_the_last_token_matches(length):
    cache = PrefixCache(1)
    prompt = list(range(length))
    assert store(cache, prompt[:64], cache_salt="other")
    store(cache, prompt)
    spans = cache.match(make_request(prompt))
    # Together, so that it is copied at once.
    assert [span[1:] for span in spans] == [(0, 0, length - 1)]


def test_a_prompt_shorter_than_a_block_is_not_kept():
    cache = PrefixCache(1)
    assert store(cache, list(range(63))) is None
    assert cache.num_bytes == 0


def test_only_the_very_same_prompt_matches_beyond_its_last_block():
    cache = PrefixCache(1)
    prompt = text(1, 2, tail=30)
    store(cache, prompt)
    for other in (prompt[:-1], [*prompt, 0], [*prompt[:-1], 7]):
        assert sum(span.num_tokens for span in cache.match(make_request(other))) == 2 * BLOCK_SIZE
    assert cache.match(make_request(prompt, cache_salt="mine")) == []


def test_what_follows_the_last_block_is_kept_of_prompts_and_not_of_answers():
    cache = PrefixCache(1)
    request = make_request(text(1, 2, tail=30))
    request.token_ids += 10 * [5]
    assert cache.store(request, request.num_tokens).num_tokens == 2 * BLOCK_SIZE
    span = cache.store(request, request.num_prompt_tokens)
    assert span[1:] == (0, 2 * BLOCK_SIZE, 30)
    assert cache.store(request, request.num_prompt_tokens) is None
    # The next turn goes on from blocks, the same prompt again from its end.
    request.token_ids += 40 * [5]
    assert cache.store(request, request.num_tokens)[1:] == (0, 2 * BLOCK_SIZE, BLOCK_SIZE)
    assert num_matched(cache, [*request.token_ids, 9]) == 3
    assert [each[1:] for each in cache.match(make_request(text(1, 2, tail=30)))] == [
        (0, 0, 2 * BLOCK_SIZE),
        (0, 2 * BLOCK_SIZE, 29),
    ]


def test_prompts_that_differ_in_few_tokens_make_no_more_segments_than_blocks_would():
    cache = PrefixCache(1)
    segments = set()
    for number in range(100):
        segments.add(store(cache, [*text(1, tail=0), 0, number]).segment_id)
        cache.shrink(10 * BLOCK_SIZE)
        segments.difference_update(cache.take_dropped())
        assert num_matched(cache, text(1)) == 1
    assert len(segments) == 9


def test_only_what_is_new_is_stored():
    cache = PrefixCache(1)
    store(cache, text(1, 2))
    span = store(cache, text(1, 2, 3, 4))
    assert (span.start, span.num_tokens) == (2 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert store(cache, text(1, 2, 3)) is None
    assert cache.num_bytes == 4 * BLOCK_SIZE


def test_blocks_of_one_segment_are_one_span():
    cache = PrefixCache(1)
    store(cache, text(1, 2))
    store(cache, text(1, 2, 3, 4))
    spans = cache.match(make_request(text(1, 2, 3, 4)))
    assert [(span.offset, span.start, span.num_tokens) for span in spans] == [
        (0, 0, 2 * BLOCK_SIZE),
        (0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE),
    ]


def test_a_salt_keeps_texts_apart():
    cache = PrefixCache(1)
    store(cache, text(1), cache_salt="mine")
    assert num_matched(cache, text(1)) == 0
    assert num_matched(cache, text(1), cache_salt="yours") == 0
    assert num_matched(cache, text(1), cache_salt="mine") == 1


def test_the_least_recently_used_goes_first():
    cache = PrefixCache(1)
    for number in (1, 2, 3):
        store(cache, text(number))
    num_matched(cache, text(1))
    cache.shrink(2 * BLOCK_SIZE)
    assert [num_matched(cache, text(number)) for number in (1, 2, 3)] == [1, 0, 1]
    assert len(cache.take_dropped()) == 1
    assert cache.take_dropped() == []


def test_of_one_text_the_end_goes_before_the_beginning():
    cache = PrefixCache(1)
    store(cache, text(1))
    store(cache, text(1, 2))
    num_matched(cache, text(1, 2))
    cache.shrink(BLOCK_SIZE)
    assert num_matched(cache, text(1, 2)) == 1


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(2048, 40_000), st.booleans())
def test_slots_hold_the_text_of_their_requests(data, budget, compact):
    """Plays the runner with tokens for KV: what is restored must be what would have been computed."""
    manager = SlotKVCacheManager(
        KVCacheSpec((KVLayerGroup(1),)),
        budget,
        max_num_seqs=4,
        max_model_len=2048,
        compact=compact,
        most_packed=2 * compact,
    )
    slots: dict[int, list[list[int | None]]] = {}
    segments: dict[int, list[int | None]] = {}
    running: list[Request] = []

    def apply():
        for change in manager.take_changes():
            match change:
                case Resize(capacity, num_slots):
                    empty = [[None] * capacity for _ in range(num_slots)]
                    slots[capacity] = (slots.get(capacity, []) + empty)[:num_slots]
                case Move(source, target):
                    length = min(source.capacity, target.capacity)
                    moved = slots[source.capacity][source.row][:length]
                    slots[target.capacity][target.row][:length] = moved
                case Store(segment_id, slot, start, num_tokens):
                    kept = slots[slot.capacity][slot.row][start : start + num_tokens]
                    assert None not in kept
                    segments[segment_id] = list(kept)
                case Restore(segment_id, offset, slot, start, num_tokens):
                    kept = segments[segment_id][offset : offset + num_tokens]
                    slots[slot.capacity][slot.row][start : start + num_tokens] = kept
                case Drop(segment_id):
                    del segments[segment_id]
        manager.check()
        assert sum(map(len, segments.values())) <= manager.prefixes.num_bytes

    for _ in range(data.draw(st.integers(1, 25))):
        if running and data.draw(st.booleans()):
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if data.draw(st.booleans()):
                manager.store(request)
            manager.free(request)
            continue
        blocks = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
        tail = data.draw(st.sampled_from([0, 1, 2, 63]) | st.integers(1, 100))
        request = make_request(text(*blocks, tail=tail))
        if len(running) == 4 or not manager.allocate(request):
            continue
        running.append(request)
        num_cached = manager.restore(request)
        assert num_cached < request.num_tokens
        apply()
        capacity, row = manager.slot(request)
        slots[capacity][row][num_cached : request.num_tokens] = request.token_ids[num_cached:]
        request.num_computed_tokens = request.num_tokens
        if data.draw(st.booleans()):
            manager.store(request)
        apply()
        for each in running:
            capacity, row = manager.slot(each)
            assert slots[capacity][row][: each.num_tokens] == each.token_ids


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 2), max_size=3), st.integers(0, 100)), max_size=20))
def test_a_prompt_that_was_there_before_has_only_its_last_token_computed(prompts):
    manager = SlotKVCacheManager(
        KVCacheSpec((KVLayerGroup(1),)), 1 << 20, max_num_seqs=1, max_model_len=2048, compact=True
    )
    seen = set()
    for blocks, tail in prompts:
        request = make_request(text(*blocks, tail=tail))
        if not request.num_tokens:
            continue
        manager.allocate(request)
        num_cached = manager.restore(request)
        if tuple(request.token_ids) in seen and request.num_tokens >= BLOCK_SIZE:
            assert num_cached == request.num_tokens - 1
        assert num_cached < request.num_tokens
        seen.add(tuple(request.token_ids))
        request.num_computed_tokens = request.num_tokens
        manager.store(request)
        request.token_ids += 70 * [3]
        request.num_computed_tokens = request.num_tokens
        manager.store(request)
        manager.free(request)
        manager.check()
