"""Log probabilities of prompts are those of a direct forward of the model, however the prompt is run."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest

import tiny_models
from engine_driver import MODES, make_core, request, run
from vllm_metal.engine import scheduler
from vllm_metal.engine.outputs import FinishReason

CASES = [
    *(("llama", mode) for mode in MODES),
    ("gemma3_text", "fused"),
    ("gpt_oss", "fused for CUDA"),
    ("mamba2", "split"),
    ("qwen3_next", "split"),
    ("deepseek_v3", "serial"),
]
PROMPTS = [[(13 * i + 5) % tiny_models.VOCAB_SIZE for i in range(length)] for length in (90, 1, 2, 40)]
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request):
    name, mode = request.param
    return tiny_models.make(name), MODES[mode]


@pytest.fixture(scope="module")
def model(case):
    return case[0]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def core(case, request):
    model, how = case
    return partial(make_core, model, overlap=request.param, **how)


def assert_right(told, model, prompt, num_top):
    assert [each.token_id for each in told] == prompt[1:]
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for position, each in enumerate(told):
        row = expected[position].tolist()
        assert each.logprob == pytest.approx(row[each.token_id], abs=TOLERANCE)
        likeliest = sorted(row, reverse=True)
        assert [logprob for _, logprob in each.top] == pytest.approx(likeliest[:num_top], abs=TOLERANCE)
        for token_id, logprob in each.top:
            assert row[token_id] == pytest.approx(logprob, abs=TOLERANCE)
        # Nearly equal ones may change places.
        least, most = (sum(other > each.logprob + d for other in row) for d in (TOLERANCE, -TOLERANCE))
        assert least <= each.rank - 1 <= most


@pytest.mark.parametrize("budget", [8, 16, 17, 256], ids="chunks of {}".format)
def test_alone_and_in_chunks(core, model, budget):
    for prompt in PROMPTS:
        asked = request("r", prompt, prompt_logprobs=3, max_tokens=3)
        answer = run(core(max_num_batched_tokens=budget), [asked])["r"]
        assert len(answer.token_ids) == 3
        assert_right(answer.prompt_logprobs, model, prompt, 3)


def test_among_others_of_which_some_do_not_ask(core, model):
    asked = [
        request(str(i), prompt, prompt_logprobs=(None, 0, 5, 1)[i], logprobs=(1, None)[i % 2])
        for i, prompt in enumerate(reversed(PROMPTS))
    ]
    answers = run(core(max_num_batched_tokens=48), asked, steps_between=2)
    assert answers["0"].prompt_logprobs == []
    for each in asked[1:]:
        prompt = each.token_ids[: each.num_prompt_tokens]
        assert_right(answers[each.request_id].prompt_logprobs, model, prompt, each.params.prompt_logprobs)


@pytest.mark.parametrize("step", range(1, 8))
def test_preempted_at_any_step(core, model, step):
    engine = core(max_num_batched_tokens=24)
    asked = [request(str(i), prompt, prompt_logprobs=2) for i, prompt in enumerate(PROMPTS)]
    for each in asked:
        engine.add_request(each)
    outputs = [output for _ in range(step) for output in engine.step()]
    for each in list(engine.scheduler.running):
        engine.scheduler._preempt(each)
    while engine.has_work():
        outputs += engine.step()
    for each, prompt in zip(asked, PROMPTS, strict=True):
        [told] = [
            output.prompt_logprobs
            for output in outputs
            if output.request_id == each.request_id and output.num_output_tokens == 1
        ]
        assert_right(told, model, prompt, 2)
        assert each.num_output_tokens == 12


def test_a_step_that_fails_is_computed_again(core, model):
    engine = core(max_num_batched_tokens=24)
    launch, calls = engine.runner.launch, []

    def launch_but_once(output):
        calls.append(output)
        if len(calls) == 3:
            raise MemoryError
        return launch(output)

    engine.runner.launch = launch_but_once
    answer = run(engine, [request("r", PROMPTS[0], prompt_logprobs=1)])["r"]
    assert_right(answer.prompt_logprobs, model, PROMPTS[0], 1)


def test_only_the_prompt(core, model):
    asked = [request(str(i), prompt, prompt_logprobs=1, max_tokens=0) for i, prompt in enumerate(PROMPTS)]
    engine = core(max_num_batched_tokens=32)
    answers = run(engine, asked)
    for each, prompt in zip(asked, PROMPTS, strict=True):
        answer = answers[each.request_id]
        assert (answer.token_ids, answer.text) == ([], "")
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert (answer.last.num_prompt_tokens, answer.last.num_output_tokens) == (len(prompt), 0)
        assert_right(answer.prompt_logprobs, model, prompt, 1)
    assert engine.stats().prompt_tokens == sum(map(len, PROMPTS))
    assert engine.stats().generation_tokens == 0


def test_kept_prefixes_are_not_read(model, case):
    prompt = [i % 300 for i in range(600)]
    engine = make_core(model, max_num_batched_tokens=128, **case[1])
    run(engine, [request("before", prompt)])
    answer = run(engine, [request("r", prompt, prompt_logprobs=0)])["r"]
    assert answer.last.num_cached_tokens == 0
    assert_right(answer.prompt_logprobs, model, prompt, 0)


def test_a_step_projects_only_so_many_tokens(monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_PROMPT_LOGPROBS", 10)
    model = tiny_models.make("llama")
    engine = make_core(model, mode="fused", max_num_batched_tokens=256)
    schedule, most = engine.scheduler.schedule, []

    def watched():
        output = schedule()
        most.append(
            sum(
                num_tokens
                for each, num_tokens in output.num_scheduled_tokens.items()
                if each.params.prompt_logprobs is not None and each.num_output_tokens == 0
            )
        )
        return output

    engine.scheduler.schedule = watched
    asked = [request(str(i), prompt, prompt_logprobs=1) for i, prompt in enumerate(PROMPTS)]
    answers = run(engine, [*asked, request("free", PROMPTS[0])])
    assert max(most) == 10
    for each, prompt in zip(asked, PROMPTS, strict=True):
        assert_right(answers[each.request_id].prompt_logprobs, model, prompt, 1)
