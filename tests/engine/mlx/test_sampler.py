from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_metal.engine.mlx import sampler
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams

VOCAB_SIZE = 1000


def make_request(seed: int = 0, position: int = 0, **params) -> Request:
    request = Request("r", [1], SamplingParams(**params), max_tokens=1 << 30, seed=seed)
    request.token_ids += [1] * position
    return request


def random_logits(rows: int, *, scale: float = 3.0, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> mx.array:
    return scale * mx.random.normal((rows, vocab_size), key=mx.random.key(seed))


@pytest.fixture(params=[True, False], ids=["candidates", "sorted"])
def sample(request):
    """Samples and reads: a token id for each row, None where it is an error."""

    def read(logits, requests):
        output = sampler.Sampler(candidates=request.param).sample(logits, requests).read()
        return [output.token_ids.get(each) for each in requests]

    return read


def expected_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, then top-k, then top-p, spelled out in numpy and float64."""
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled - scaled.max())
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= params.top_p]] = 0
        probabilities /= probabilities.sum()
    return probabilities


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
        {"temperature": 5.0, "top_p": 0.95},  # the cut lies far below the candidates: the slow path
        {"temperature": 1.0, "top_k": 500, "top_p": 0.999},
    ],
)
def test_draws_follow_the_distribution(sample, params):
    logits = random_logits(1)
    num_draws = 4000
    counts: Counter[int | None] = Counter()
    for start in range(0, num_draws, 500):
        rows = [make_request(seed=start + row, **params) for row in range(500)]
        counts.update(sample(mx.broadcast_to(logits, (500, VOCAB_SIZE)), rows))
    expected = expected_probabilities(np.array(logits[0]), SamplingParams(**params))
    assert all(expected[token_id] > 0 for token_id in counts), "a token that was cut has been drawn"
    drawn = np.array([counts[token_id] for token_id in range(VOCAB_SIZE)]) / num_draws
    # Total variation of an honest sample of this size stays well under this (Devroye, 1983).
    kept = (expected > 0).sum()
    assert 0.5 * np.abs(drawn - expected).sum() < 0.5 * np.sqrt(kept / num_draws) + 0.02


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.floats(0.1, 3.0), st.floats(0.05, 1.0), st.integers(0, 300))
def test_a_row_does_not_depend_on_its_neighbours(sample, seed, temperature, top_p, top_k):
    logits = random_logits(4, seed=seed % 97)
    mine = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    neighbours = [
        make_request(seed=1, temperature=0.0),
        make_request(seed=2, temperature=2.5, top_p=0.99),
        make_request(seed=3, temperature=1.0),
    ]
    alone = sample(logits[:1], [make_request(seed=seed, position=5, **mine)])
    together = sample(logits, [make_request(seed=seed, position=5, **mine), *neighbours])
    assert together[0] == alone[0]
    assert together[1] == mx.argmax(logits[1]).item()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}, {"top_p": 1e-6}])
def test_greedy(sample, params):
    logits = random_logits(3)
    rows = [make_request(seed=row, **params) for row in range(3)]
    assert sample(logits, rows) == mx.argmax(logits, axis=-1).tolist()


def test_a_draw_depends_on_seed_and_position(sample):
    logits = mx.zeros((1, VOCAB_SIZE))
    draws = {(seed, position): sample(logits, [make_request(seed, position)])[0]
             for seed in (0, 1, -1, 2**200) for position in range(3)}  # fmt: skip
    assert len(set(draws.values())) > 6
    assert sample(logits, [make_request(1, 2)])[0] == draws[1, 2]


def test_a_top_k_above_the_vocabulary_means_all_of_it(sample):
    logits = random_logits(1)
    everything = sample(logits, [make_request(seed=9)])
    assert sample(logits, [make_request(seed=9, top_k=VOCAB_SIZE * 10)]) == everything


def test_nan_fails_its_own_row_only(sample):
    logits = random_logits(3)
    logits[1, 7] = mx.nan
    rows = [make_request(temperature=0.0), make_request(), make_request(temperature=0.0)]
    token_ids = sample(logits, rows)
    assert token_ids[1] is None
    assert token_ids[0] == mx.argmax(logits[0]).item()
    assert token_ids[2] == mx.argmax(logits[2]).item()


def test_masked_tokens_are_not_nan_and_never_drawn(sample):
    logits = mx.full((8, VOCAB_SIZE), -mx.inf)
    logits[:, 3] = 1.0
    logits[:, 5] = 1.0
    drawn = sample(logits, [make_request(seed=seed, top_p=0.9) for seed in range(8)])
    assert set(drawn) <= {3, 5}
