from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.engine.step_pace import WINDOW, StepPace


def observed(stretch: float, *, decode_s: float, token_s: float, min_chunk: int = 16) -> StepPace:
    pace = StepPace(stretch, min_chunk)
    for _ in range(4):
        pace.observe(8, 0, decode_s)
        pace.observe(8, 256, decode_s + 256 * token_s)
    return pace


@given(
    st.sampled_from([1.1, 1.25, 2.0, 3.0]),
    st.floats(0.002, 0.2),
    st.floats(1e-6, 0.01),
)
def test_the_mean_step_stays_within_the_stretch(stretch, decode_s, token_s):
    pace = observed(stretch, decode_s=decode_s, token_s=token_s)
    spent_s = 0.0
    num_steps = 200
    for _ in range(num_steps):
        num_tokens = pace.allowance(8, 10**9)
        pace.spend(8, num_tokens)
        spent_s += num_tokens * token_s
    allowed_s = (num_steps + WINDOW) * (stretch - 1) * decode_s
    # Where a least chunk costs more than a window's credit, it runs all the same, once a window.
    least_s = (num_steps // WINDOW + 1) * 16 * token_s
    assert spent_s <= 1.01 * max(allowed_s, least_s)
    assert spent_s > 0


def test_alone_a_prompt_gets_the_whole_budget():
    assert observed(1.0, decode_s=0.01, token_s=0.001).allowance(0, 2048) == 2048


def test_the_first_step_of_a_shape_is_not_believed():
    pace = StepPace(2.0, 16)
    pace.observe(8, 0, 5.0)
    for _ in range(3):
        pace.observe(8, 0, 0.01)
        pace.observe(8, 64, 0.01 + 64 * 0.001)
    assert pace.allowance(8, 2048) == 0  # 10 ms are 10 tokens, too few for a chunk
    assert 19 <= pace.allowance(8, 2048) <= 20


def test_small_chunks_are_saved_up_for():
    pace = observed(2.0, decode_s=0.01, token_s=0.001, min_chunk=64)
    dealt = [pace.allowance(8, 2048) for _ in range(1)]
    for _ in range(40):
        pace.spend(8, dealt[-1])
        dealt.append(pace.allowance(8, 2048))
    assert 0 in dealt
    assert min(n for n in dealt if n) >= 64
