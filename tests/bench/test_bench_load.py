from __future__ import annotations

import statistics
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.bench.load import Load
from vllm_metal.bench.words import WORDS

MIX = {"input_words": (1, 16, 64), "output_len": (8, 32)}


def test_the_same_seed_draws_the_same_and_another_another():
    load = Load(num_prompts=20, **MIX, request_rate=5)
    assert load.prompts() == Load(num_prompts=20, **MIX, request_rate=5).prompts()
    assert load.prompts() != Load(num_prompts=20, **MIX, request_rate=5, seed=1).prompts()


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_prompts_have_the_lengths_of_the_mix_and_begin_differently(seed: int, shared_prefix_words: int):
    load = Load(num_prompts=30, **MIX, seed=seed, shared_prefix_words=shared_prefix_words, warmup=3)
    prompts = load.prompts()
    assert {len(prompt.text.split()) for prompt in prompts} <= {1, 16, 64}
    assert {prompt.max_tokens for prompt in prompts} <= {8, 32}
    assert len({prompt.text.split()[0] for prompt in prompts}) == 30
    assert {len(prompt.shared.split()) for prompt in prompts} == {shared_prefix_words}
    assert len({prompt.shared for prompt in prompts}) == 1
    assert len(load.warmup_prompts()) == 3
    if shared_prefix_words > 4:
        assert load.warmup_prompts()[0].shared != prompts[0].shared


def test_requests_arrive_at_the_asked_rate():
    sent_at_s = [prompt.send_at_s for prompt in Load(num_prompts=4000, **MIX, request_rate=5).prompts()]
    gaps = [later - earlier for earlier, later in pairwise(sent_at_s)]
    assert sent_at_s[0] == 0
    assert min(gaps) > 0
    # Of a Poisson process the gaps' mean and deviation are both 1 / rate.
    assert abs(statistics.mean(gaps) - 0.2) < 0.02
    assert abs(statistics.stdev(gaps) - 0.2) < 0.02


def test_without_a_rate_all_are_sent_at_once():
    assert {prompt.send_at_s for prompt in Load(num_prompts=9, **MIX).prompts()} == {0}


def test_words_are_distinct():
    assert len(WORDS) == len(set(WORDS)) > 200
