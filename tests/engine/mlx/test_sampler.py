"""The one graph against numpy in float64, whatever is asked and whoever is in the batch."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_metal.engine.core import ModelRunnerOutput
from vllm_metal.engine.mlx import draw
from vllm_metal.engine.mlx.draw import uniform_for
from vllm_metal.engine.mlx.sampler import SampledStep, Sampler
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams

VOCAB_SIZE = 1000
EOS = frozenset({2})


def make_request(seed: int = 0, position: int = 0, **params) -> Request:
    request = Request("r", [1], SamplingParams(**params), max_tokens=1 << 30, seed=seed)
    request.token_ids += [1] * position
    return request


def random_logits(rows: int, *, scale: float = 3.0, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> mx.array:
    return scale * mx.random.normal((rows, vocab_size), key=mx.random.key(seed))


@pytest.fixture(autouse=True)
def fewer_candidates_than_tokens(monkeypatch):
    """As in a real vocabulary."""
    monkeypatch.setattr(draw, "NUM_CANDIDATES", 256)


@pytest.fixture(params=[True, False], ids=["candidates", "sorted"])
def sample(request):
    """Samples and reads: a token id for each row, None where it is an error."""

    def read(logits, requests):
        output = Sampler(candidates=request.param).sample(logits, requests).read()
        return [output.token_ids.get(each) for each in requests]

    return read


def adjusted(logits: np.ndarray, request: Request, eos_token_ids: frozenset[int] = EOS) -> np.ndarray:
    """What a request's constraints and penalties make of `logits`, spelled out in float64."""
    params, logits = request.params, logits.astype(np.float64)
    output = request.token_ids[request.num_prompt_tokens :]
    forbidden = set()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(logits))) - set(params.allowed_token_ids)
    if len(output) < params.min_tokens:
        forbidden |= params.end_token_ids(eos_token_ids)
    for *prefix, last in params.bad_words:
        if prefix == output[len(output) - len(prefix) :] and len(prefix) <= len(output):
            forbidden.add(last)
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    logits[list(forbidden)] = -np.inf
    for token_id in set(request.token_ids):
        factor = 1 / params.repetition_penalty if logits[token_id] > 0 else params.repetition_penalty
        logits[token_id] *= factor
    for token_id, count in Counter(output).items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def expected_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, then min-p, top-k and top-p, spelled out in float64."""
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled - scaled.max())
    probabilities[probabilities < params.min_p] = 0
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= params.top_p]] = 0
        probabilities /= probabilities.sum()
    return probabilities


def possible_tokens(logits: np.ndarray, request: Request, eos_token_ids: frozenset[int] = EOS) -> set[int]:
    """The token that `request` draws out of `logits`, and those that rounding may put in its place."""
    logits = adjusted(logits, request, eos_token_ids)
    if request.params.greedy:
        return set(np.flatnonzero(logits >= logits.max() - 1e-4).tolist())
    tokens = set()
    for nudge in (-1e-5, 0.0, 1e-5):
        nudged = dataclasses.replace(
            request.params,
            top_p=min(request.params.top_p * (1 + nudge), 1.0),
            min_p=min(request.params.min_p * (1 + nudge), 1.0),
        )
        cumulated = np.cumsum(expected_probabilities(logits, nudged))
        for share in (-1e-5, 0.0, 1e-5):
            place = np.clip(uniform_for(request) + share, 0, cumulated[-1] * (1 - 1e-12))
            tokens.add(int(np.searchsorted(cumulated, place, side="right")))
    return tokens


class Batch:
    """Requests that are sampled step after step, on the host one step behind if `overlapped`."""

    def __init__(self, *, overlapped: bool, candidates: bool) -> None:
        self.sampler = Sampler(candidates=candidates, eos_token_ids=EOS)
        self.overlapped = overlapped
        self._in_flight: SampledStep | None = None

    def step(self, logits: dict[Request, np.ndarray], rows: list[Request | None]) -> None:
        """Sample for the requests of `rows`, each out of its own `logits`."""
        blank = np.zeros(VOCAB_SIZE, np.float32)
        stacked = mx.array(np.stack([logits.get(request, blank) for request in rows]))
        launched = self.sampler.sample(stacked, rows)
        for request in filter(None, rows):
            request.num_pending_tokens += 1
        read, self._in_flight = (self._in_flight, launched) if self.overlapped else (launched, None)
        self._read(read)

    def finish(self) -> None:
        self._read(self._in_flight)

    @staticmethod
    def _read(step: SampledStep | None) -> None:
        output = step.read() if step else ModelRunnerOutput()
        assert not output.errors
        for request, token_id in output.token_ids.items():
            request.token_ids.append(token_id)
            request.num_pending_tokens -= 1


TOKENS = st.integers(0, VOCAB_SIZE - 1)
# A vocabulary in which the few likely tokens come again and again.
LIKELY = st.integers(0, 7)
PARAMS = st.fixed_dictionaries(
    {"temperature": st.just(0.0) | st.floats(0.3, 2.0)},
    optional={
        "top_p": st.floats(0.1, 1.0),
        "top_k": st.integers(0, 20),
        "min_p": st.floats(0.0, 0.5),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "logit_bias": st.dictionaries(TOKENS | LIKELY, st.floats(-100, 100), max_size=5).map(
            lambda biases: tuple(biases.items())
        ),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(LIKELY, max_size=2).map(tuple),
        "ignore_eos": st.booleans(),
        "allowed_token_ids": st.sets(TOKENS | LIKELY, min_size=20, max_size=40).map(tuple),
        "bad_words": st.lists(st.lists(LIKELY, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
        "logprobs": st.integers(0, 20),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt = draw(st.lists(TOKENS | LIKELY, min_size=1, max_size=9))
    return Request("r", prompt, SamplingParams(**draw(PARAMS)), max_tokens=99, seed=draw(st.integers(0, 99)))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans(), st.booleans())
def test_any_parameters_do_what_they_say_in_a_batch_that_changes(data, overlapped, candidates):
    batch = Batch(overlapped=overlapped, candidates=candidates)
    members = data.draw(st.lists(requests(), min_size=1, max_size=4))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    seen: dict[Request, list[np.ndarray]] = {member: [] for member in members}
    for _ in range(6):
        present = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
        logits = {}
        for member in present:
            logits[member] = random.normal(scale=2, size=VOCAB_SIZE).astype(np.float32)
            logits[member][:8] += 4
            seen[member].append(logits[member])
        batch.step(logits, [None, *present, None] if data.draw(st.booleans()) else present)
    batch.finish()
    for member, each in seen.items():
        answer = member.token_ids[member.num_prompt_tokens :]
        del member.token_ids[member.num_prompt_tokens :]
        for logits_then, token_id in zip(each, answer, strict=True):
            assert token_id in possible_tokens(logits_then, member)
            member.token_ids.append(token_id)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
        {"temperature": 5.0, "top_p": 0.95},  # the cut lies far below the candidates: the slow path
        {"temperature": 1.0, "top_k": 500, "top_p": 0.999},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
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


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests(), st.lists(requests(), max_size=3), st.integers(0, 99))
def test_a_row_does_not_depend_on_its_neighbours(sample, mine, neighbours, seed):
    logits = random_logits(1 + len(neighbours), seed=seed)
    assert sample(logits[:1], [mine]) == sample(logits, [mine, *neighbours])[:1]


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


def test_what_nobody_asks_for_is_not_computed():
    def primitives(*params: dict) -> str:
        rows = [make_request(**each) for each in params]
        dot = io.StringIO()
        mx.export_to_dot(dot, *Sampler(candidates=False).sample(random_logits(len(rows)), rows).arrays)
        return dot.getvalue()

    greedy = {"temperature": 0.0}
    plain = primitives(greedy, greedy)
    assert plain.count("ArgReduce") == 1
    assert not any(name in plain for name in ("Sort", "Scatter", "Gather", '"Exp"', "LogSumExp", "CumSum"))
    drawn = primitives(greedy, {"temperature": 1.0})
    assert "CumSum" in drawn
    assert not any(name in drawn for name in ("Sort", "Scatter", "LogSumExp"))
    assert "LogSumExp" in primitives(greedy, {**greedy, "logprobs": 0})


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_bad_words_of_several_tokens_and_the_end_before_its_time(overlapped):
    """The likeliest tokens are 2 (the end), 5 and 6. Neither 5 nor 6 may follow itself, or 2 come early."""
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[[2, 5, 6]] = 3, 2, 1
    params = SamplingParams(temperature=0.0, min_tokens=4, bad_words=((5, 5), (6, 6), (5, 6, 5)))
    requests = [Request("r", [5], params, max_tokens=9, seed=0) for _ in range(3)]
    batch = Batch(overlapped=overlapped, candidates=False)
    late, *early = requests
    for step in range(6):
        rows = [*early, late] if step else early
        # They change places, so a pending token is found in another row than its request's own.
        batch.step(dict.fromkeys(rows, logits), rows[step % len(rows) :] + rows[: step % len(rows)])
    batch.finish()
    # Behind 5 and 6 all three are forbidden; 0 is the first of the others.
    for request in early:
        assert request.token_ids[1:] == [5, 6, 0, 5, 2, 2]
    assert late.token_ids[1:] == [5, 6, 0, 5, 2]


def test_token_ids_past_the_models_vocabulary_are_harmless(sample):
    beyond = VOCAB_SIZE + 5
    params = {
        "logit_bias": ((beyond, 5.0),),
        "allowed_token_ids": (3, beyond),
        "bad_words": ((beyond,), (1, beyond)),
        "stop_token_ids": (beyond, -1),
        "min_tokens": 4,
    }
    assert sample(random_logits(1), [make_request(temperature=0.0, **params)]) == [3]


def test_a_request_that_allows_nothing_fails_alone():
    rows = [
        make_request(temperature=0.0, allowed_token_ids=(3,), bad_words=((3,),)),
        make_request(temperature=0.0),
    ]
    logits = random_logits(2)
    output = Sampler(candidates=False).sample(logits, rows).read()
    assert output.errors == {rows[0]: "the request allows none of the tokens that the model could give"}
    assert output.token_ids == {rows[1]: mx.argmax(logits[1]).item()}


def test_logprobs_are_of_the_models_own_logits():
    rows = [
        make_request(temperature=0.0, logprobs=0),
        make_request(temperature=0.0),
        make_request(temperature=0.3, top_k=3, logprobs=3, presence_penalty=2.0, logit_bias=((7, 100.0),)),
        make_request(temperature=2.0, min_p=0.1, logprobs=20),
    ]
    logits = random_logits(4)
    logits[3, 5] = mx.nan
    output = Sampler(candidates=False).sample(logits, rows).read()
    assert output.logprobs.keys() == {rows[0], rows[2]}
    for row in (0, 2):
        own = np.array(logits[row], np.float64)
        expected = own - np.log(np.exp(own).sum())
        told = output.logprobs[rows[row]]
        assert told.token_id == output.token_ids[rows[row]]
        assert told.logprob == pytest.approx(expected[told.token_id], abs=1e-4)
        top = np.argsort(-expected)[: rows[row].params.logprobs]
        assert [token_id for token_id, _ in told.top] == top.tolist()
        assert [logprob for _, logprob in told.top] == pytest.approx(expected[top], abs=1e-4)


def test_tokens_that_cannot_be_are_no_top_logprobs():
    logits = mx.full((1, VOCAB_SIZE), -mx.inf)
    logits[0, 3] = 1.0
    [request] = rows = [make_request(temperature=0.0, logprobs=5)]
    assert Sampler(candidates=False).sample(logits, rows).read().logprobs[request].top == ((3, 0.0),)
