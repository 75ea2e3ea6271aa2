from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.engine.step_pace import WINDOW, StepPace


def observed(
    stretch: float, *, decode_s: float, token_s: float, fixed_s: float = 0.0, min_chunk: int = 16
) -> StepPace:
    pace = StepPace(stretch, min_chunk)
    for _ in range(4):
        pace.observe(8, 0, decode_s)
        for num_tokens in (64, 1024):
            pace.observe(0, num_tokens, fixed_s + num_tokens * token_s)
    return pace


@given(
    st.sampled_from([1.1, 1.25, 2.0, 3.0]),
    st.floats(0.002, 0.2),
    st.floats(1e-6, 0.01),
    st.floats(0.0, 0.05),
)
def test_the_mean_step_stays_within_the_stretch(stretch, decode_s, token_s, fixed_s):
    pace = observed(stretch, decode_s=decode_s, token_s=token_s, fixed_s=fixed_s)
    spent_s, num_steps = 0.0, 200
    least = 2 * max(16, fixed_s / token_s)
    for _ in range(num_steps):
        if num_tokens := pace.allowance(8, 10**9):
            pace.spend(8, num_tokens)
            spent_s += fixed_s + num_tokens * token_s
    allowed_s = (num_steps + WINDOW) * (stretch - 1) * decode_s
    # Where a least chunk costs more than a window's credit, it runs all the same, once a window.
    least_s = (num_steps // WINDOW + 1) * (fixed_s + least * token_s)
    assert 0 < spent_s <= 1.05 * max(allowed_s, least_s)


def test_fixed_costs_and_costs_a_token_are_told_apart():
    """Where a chunk as such costs as much as 500 tokens, smaller ones are waited for."""
    pace = observed(2.0, decode_s=0.010, token_s=0.00002, fixed_s=0.010)
    dealt = []
    for _ in range(8):
        dealt.append(pace.allowance(8, 10**9))
        pace.spend(8, dealt[-1])
    assert min(n for n in dealt if n) >= 500 // 2
    assert 0 in dealt


def test_a_short_prompt_runs_as_soon_as_it_can_be_afforded():
    pace = observed(2.0, decode_s=0.010, token_s=0.001, min_chunk=256)
    assert pace.allowance(8, 5) == 5
    pace.spend(8, 5)
    assert pace.allowance(8, 300) == 0


def test_several_short_prompts_are_waited_for_where_a_step_of_prefill_is_dear():
    pace = observed(2.0, decode_s=0.010, token_s=0.00001, fixed_s=0.009)
    assert pace.allowance(8, 80) == 0
    assert pace.allowance(8, 80) == 80


def test_part_of_a_prompt_comes_in_few_shapes():
    pace = observed(2.0, decode_s=0.1, token_s=0.001)
    for _ in range(20):
        num_tokens = pace.allowance(8, 10_000)
        pace.spend(8, num_tokens)
        assert num_tokens.bit_count() <= 1


def test_alone_a_prompt_gets_the_whole_budget():
    assert observed(1.0, decode_s=0.01, token_s=0.001).allowance(0, 2048) == 2048


def test_the_first_step_of_a_shape_is_not_believed():
    pace = StepPace(2.0, 16)
    pace.observe(8, 0, 5.0)
    for _ in range(3):
        pace.observe(8, 0, 0.01)
        pace.observe(0, 64, 64 * 0.001)
        pace.observe(0, 512, 512 * 0.001)
    assert pace.allowance(8, 2048) == 0  # 10 ms are 10 tokens, too few for a chunk
    assert pace.allowance(8, 2048) == 16


def test_small_chunks_are_saved_up_for():
    pace = observed(2.0, decode_s=0.01, token_s=0.001, min_chunk=64)
    dealt = []
    for _ in range(40):
        dealt.append(pace.allowance(8, 2048))
        pace.spend(8, dealt[-1])
    assert set(dealt) == {0, 64}


def run(pace: StepPace, cost_s: Callable[[int], float], *, num_steps: int, decode_s: float) -> list[int]:
    """What is dealt in each step, where a step's time is known two steps later, as with one step ahead."""
    dealt: list[int] = []
    for number in range(num_steps):
        dealt.append(pace.allowance(8, 10**9))
        pace.spend(8, dealt[-1])
        if number >= 2:
            num_tokens = dealt[number - 2]
            pace.observe(8, num_tokens, decode_s + (cost_s(num_tokens) if num_tokens else 0.0))
    return dealt


@given(st.sampled_from([1.1, 1.25, 2.0]), st.floats(1.0, 20.0))
def test_what_a_step_costs_beyond_belief_is_paid_for(stretch, dearer):
    pace = observed(stretch, decode_s=0.01, token_s=0.00001, min_chunk=256)

    def cost_s(num_tokens: int) -> float:
        return dearer * num_tokens * 0.00001

    dealt = run(pace, cost_s, num_steps=400, decode_s=0.01)
    spent_s = sum(map(cost_s, dealt))
    allowed_s = (stretch - 1) * 0.01 * (len(dealt) + 2 * WINDOW)
    least_s = (len(dealt) // WINDOW + 1) * cost_s(256)
    assert spent_s <= 1.1 * max(allowed_s, least_s) + 3 * cost_s(max(dealt))


def test_larger_chunks_are_tried_though_only_small_ones_were_seen():
    pace = StepPace(2.0, 256)
    for _ in range(4):
        pace.observe(8, 0, 0.01)
        pace.observe(0, 256, 0.008)
    dealt = run(pace, lambda num_tokens: 0.007 + num_tokens * 4e-6, num_steps=100, decode_s=0.01)
    assert max(dealt) >= 1024


def test_a_size_that_was_dear_once_is_tried_again():
    pace = StepPace(2.0, 256)
    for _ in range(4):
        pace.observe(8, 0, 0.01)
        pace.observe(0, 2048, 0.4)  # memory grew
        pace.observe(0, 256, 0.008)
    dealt = run(pace, lambda num_tokens: 0.007 + num_tokens * 4e-6, num_steps=1000, decode_s=0.01)
    assert max(dealt[-100:]) >= 1024


def gaps_one_step_ahead(pace: StepPace, cost_s: Callable[[int], tuple[float, float]]) -> list[float]:
    """Times between the tokens of eight streams, while prompts wait without end.

    A step takes the host and the device the two times that `cost_s` gives for its prefill tokens. It is
    launched before the one before is read, as in `EngineCore`.
    """
    now_s = device_free_s = 0.0
    flight: tuple[float, float, int] | None = None
    read_at_s = [0.0]
    for number in range(1000):
        num_tokens = pace.allowance(8, 2048) if number >= 100 else 0
        pace.spend(8, num_tokens)
        launched_s = now_s
        host_s, device_s = cost_s(num_tokens)
        now_s += host_s
        device_free_s = max(now_s, max(device_free_s, launched_s) + device_s)
        if flight:
            began_s, ready_s, num_prefill_tokens = flight
            now_s = max(now_s, ready_s)
            pace.observe(8, num_prefill_tokens, now_s - max(began_s, read_at_s[-1]))
            read_at_s.append(now_s)
        flight = launched_s, device_free_s, num_tokens
    return [after - before for before, after in pairwise(read_at_s)]


@given(
    st.sampled_from([1.1, 1.25, 2.0]),
    st.floats(0.001, 0.02),
    st.floats(1.0, 3.0),
    st.floats(0.001, 0.05),
    st.sampled_from([4e-6, 3e-4, 3e-3]),
)
def test_one_step_ahead_the_stretch_holds_whoever_takes_the_time(stretch, host_s, dearer, device_s, token_s):
    """The host's time for a chunk shows in the steps beside it."""

    def cost_s(num_tokens: int) -> tuple[float, float]:
        return host_s * (dearer if num_tokens else 1.0), device_s + num_tokens * token_s

    pace = StepPace(stretch, 64)
    for num_tokens in 2 * (64, 2048):  # prompts that came alone
        pace.observe(0, num_tokens, max(cost_s(num_tokens)))
    gaps_s = gaps_one_step_ahead(pace, cost_s)
    decode_s = gaps_s[50]
    assert sum(gaps_s[200:]) <= 1.05 * stretch * decode_s * len(gaps_s[200:]) + 2 * WINDOW * decode_s
