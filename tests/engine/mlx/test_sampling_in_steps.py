"""What requests ask of the sampler comes out the same however steps are run: ahead, batched, preempted."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

import tiny_models
from engine_driver import MODES, Answer, make_core, request, run, solo
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.outputs import TokenLogprobs

EOS = frozenset({11})

ASKED = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7, "temperature": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "min_p": {"min_p": 0.05, "temperature": 1.5},
    "logit_bias": {"logit_bias": ((5, 2.5), (6, 2.5), (11, 3.0)), "temperature": 1.0},
    "min_tokens": {"min_tokens": 9, "logit_bias": ((11, 100.0), (12, 50.0)), "stop_token_ids": (12,)},
    "allowed": {"allowed_token_ids": tuple(range(20)), "temperature": 1.0},
    "bad_words": {
        "allowed_token_ids": (5, 6, 7),
        "bad_words": ((5, 5), (6, 6), (7, 7), (7, 6), (6, 5, 6)),
        "temperature": 1.0,
    },
    "logprobs": {"logprobs": 4, "temperature": 0.9, "top_p": 0.9},
    "all": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": ((5, 3.0), (11, 9.0)),
        "min_tokens": 6,
        "bad_words": ((5, 5), (9,)),
        "logprobs": 2,
    },
    "nothing": {},
}


def requests():
    prompts = {name: [(7 * i + number) % 320 for i in range(number + 2)] for number, name in enumerate(ASKED)}
    return [
        request(name, prompts[name], max_tokens=20, seed=number, **params)
        for number, (name, params) in enumerate(ASKED.items())
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_models.make("llama")


@pytest.fixture(scope="module")
def alone(model) -> dict[str, Answer]:
    return {each.request_id: solo(model, each, eos_token_ids=EOS) for each in requests()}


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert (name, answer.token_ids) == (name, expected[name].token_ids)
        assert [each.token_id for each in answer.logprobs] == [
            each.token_id for each in expected[name].logprobs
        ]
        for got, wanted in zip(answer.logprobs, expected[name].logprobs, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-3)
            assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in wanted.top]


@pytest.mark.parametrize("steps_between", [0, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("mode", MODES)
def test_batched_and_ahead_as_alone(model, alone, mode, overlap, steps_between):
    core = make_core(
        model,
        **MODES[mode],
        overlap=overlap,
        eos_token_ids=EOS,
        max_num_seqs=16,
        max_num_batched_tokens=16,
    )
    assert_same(run(core, requests(), steps_between=steps_between), alone)


def test_alone_they_do_what_they_say(alone):
    assert alone["min_tokens"].token_ids[9:] == [11]
    assert not EOS.union({12}).intersection(alone["min_tokens"].token_ids[:9])
    assert set(alone["allowed"].token_ids) <= set(range(20))
    written = alone["bad_words"].token_ids
    assert set(written) == {5, 6, 7}
    assert set(pairwise(written)).isdisjoint({(5, 5), (6, 6), (7, 7), (7, 6)})
    assert (6, 5, 6) not in set(zip(written, written[1:], written[2:], strict=False))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_preempted(model, overlap):
    """Penalties and words go on where they stood when a request is computed again."""
    asked = {
        "presence_penalty": 0.8,
        "repetition_penalty": 1.1,
        "bad_words": ((5, 6, 7),),
        "temperature": 0.7,
    }

    def pair():
        return [
            request(str(seed), [(7 * i + seed) % 320 for i in range(250)], max_tokens=40, seed=seed, **asked)
            for seed in (1, 2)
        ]

    spec = kv_cache.measure(model)
    core = make_core(model, overlap=overlap, kv_budget_bytes=2 * spec.num_bytes(512) - 1)
    answers = run(core, pair())
    assert core.scheduler.num_preemptions >= 1
    assert_same(answers, {each.request_id: solo(model, each) for each in pair()})


@pytest.mark.parametrize("mode", ["split", "fused"])
def test_computed_again_after_a_failed_step(model, alone, mode):
    core = make_core(model, mode=mode, overlap=True, eos_token_ids=EOS, max_num_seqs=16)
    launch, num_launches = core.runner.launch, 0

    def failing(output):
        nonlocal num_launches
        num_launches += 1
        step = launch(output)
        if num_launches == 7:
            raise RuntimeError("out of memory")
        return step

    core.runner.launch = failing
    assert_same(run(core, requests()), alone)
    assert core.scheduler.num_preemptions == len(ASKED)


def test_logprobs_are_those_of_the_model(model, alone):
    [asked] = [each for each in requests() if each.request_id == "all"]
    answer = alone["all"]
    text = [*asked.token_ids, *answer.token_ids]
    logits = np.array(model(mx.array([text]), cache=kv_cache.new_caches(model))[0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    told: TokenLogprobs
    for place, told in enumerate(answer.logprobs, len(asked.token_ids) - 1):
        top = np.argsort(-logprobs[place])[:2]
        assert told.token_id == text[place + 1]
        assert told.logprob == pytest.approx(logprobs[place, told.token_id], abs=1e-3)
        assert [token_id for token_id, _ in told.top] == top.tolist()
        assert [logprob for _, logprob in told.top] == pytest.approx(logprobs[place, top], abs=1e-3)
    assert len(answer.logprobs) == len(answer.token_ids)
