"""In float32 a request's tokens are the same alone, batched, in chunks of any size, and preempted."""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx
import pytest

import tiny_models
from engine_driver import MODES, make_core, request, run
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec
from vllm_metal.engine.mlx.self_check import Mode, Reference, agrees

PROMPTS = [
    [(13 * i + 5) % tiny_models.VOCAB_SIZE for i in range(40)],
    [7],
    [(5 * i + 1) % tiny_models.VOCAB_SIZE for i in range(9)],
    [3, 1, 4, 1, 5],
    [(3 * i + 2) % tiny_models.VOCAB_SIZE for i in range(23)],
]


#: Families whose attention goes through mlx-lm's one function, on plain keys and values.
FUSED = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")

FUSED_CASES = [
    *((name, mode) for name in FUSED for mode in ("fused", "fused for CUDA")),
    *((name, "fused for Metal") for name in ("llama", "gemma3_text")),
]
CASES = [(name, mode) for name in tiny_models.CONFIGS for mode in ("split", "serial")] + FUSED_CASES


def _named(param):
    return f"{param[0]}-{param[1]}"


@cache
def _model(name):
    return tiny_models.make(name)


@cache
def _reference(name, prompt, max_tokens):
    """Greedy tokens by mlx-lm's own single-sequence caches, and the top-2 gap behind each."""
    model = _model(name)
    caches = kv_cache.new_caches(model)
    logits = model(mx.array([prompt]), cache=caches)[0, -1]
    token_ids, gaps = [], []
    for _ in range(max_tokens):
        best = mx.sort(logits)
        token_ids.append(mx.argmax(logits).item())
        gaps.append((best[-1] - best[-2]).item())
        logits = model(mx.array([[token_ids[-1]]]), cache=caches)[0, -1]
    return token_ids, gaps


@pytest.fixture(scope="module", params=CASES, ids=_named)
def case(request):
    """The name of a tiny model, and how to run it."""
    name, mode = request.param
    return name, MODES[mode]


@pytest.fixture(scope="module")
def model(case):
    return _model(case[0])


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def core(case, model, request):
    """Makes an engine core for the case."""
    return partial(make_core, model, overlap=request.param, **case[1])


@pytest.fixture(scope="module")
def reference(case):
    """What the model answers a prompt."""
    return lambda prompt, max_tokens=12: _reference(case[0], tuple(prompt), max_tokens)


def _assert_same(token_ids, reference):
    expected, gaps = reference
    for index, (got, wanted) in enumerate(zip(token_ids, expected, strict=True)):
        if got != wanted:
            assert gaps[index] < 1e-3, f"token {index} differs with a top-2 gap of {gaps[index]}"
            return


@pytest.fixture(scope="module")
def references(reference):
    return [reference(prompt) for prompt in PROMPTS]


def test_alone(core, references):
    for prompt, reference in zip(PROMPTS, references, strict=True):
        _assert_same(run(core(), [request("r", prompt)])["r"].token_ids, reference)


@pytest.mark.parametrize("steps_between", [0, 1, 5])
def test_batched_joining_and_leaving_at_any_step(core, references, steps_between):
    requests = [
        request(str(index), prompt, max_tokens=12 - 2 * (index % 3)) for index, prompt in enumerate(PROMPTS)
    ]
    answers = run(core(), requests, steps_between=steps_between)
    for index, (expected, gaps) in enumerate(references):
        length = requests[index].max_tokens
        assert len(answers[str(index)].token_ids) == length
        _assert_same(answers[str(index)].token_ids, (expected[:length], gaps))


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunked(core, references, chunk):
    one_by_one = core(max_num_seqs=1, max_num_batched_tokens=chunk)
    requests = [request(str(index), prompt, max_tokens=6) for index, prompt in enumerate(PROMPTS)]
    answers = run(one_by_one, requests)
    for index, (expected, gaps) in enumerate(references):
        _assert_same(answers[str(index)].token_ids, (expected[:6], gaps))


@pytest.mark.parametrize(
    "case", [(name, "fused for CUDA") for name in ("llama", "gemma3_text")], ids=_named, indirect=True
)
@pytest.mark.parametrize("budget", [20, 100, 300])
def test_chunks_in_few_shapes(core, reference, budget):
    """Beside a decode; from the beginning and from where kept text ends, between multiples of the grain."""
    engine = core(chunk_grain=128, max_num_batched_tokens=budget)
    long = [(11 * i + 4) % tiny_models.VOCAB_SIZE for i in range(300)]
    run(engine, [request("kept", long, max_tokens=1)])
    prompts = {"decoding": [7], "alike": long[:70] + long[::-1], "other": [9, *long]}
    answers = run(engine, [request(name, prompt) for name, prompt in prompts.items()], steps_between=2)
    assert answers["alike"].last.num_cached_tokens == 64
    for name, prompt in prompts.items():
        _assert_same(answers[name].token_ids, reference(prompt))


def test_ended_by_a_token(core, references):
    """With one step ahead a row of the ended request is computed for nothing, and must harm nobody."""
    ends = frozenset(expected[4] for expected, _ in references)
    answers = run(
        core(eos_token_ids=ends), [request(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
    )
    for index, (expected, gaps) in enumerate(references):
        length = next(at for at, token_id in enumerate(expected) if token_id in ends) + 1
        _assert_same(answers[str(index)].token_ids, (expected[:length], gaps))


def test_preempted(core, case, model, reference):
    """Two requests that start where both fit and grow to where one does, so the later is computed again."""
    if case[1]["mode"] == "fused":
        budget, max_tokens = 3 * 512 * slot_spec(layer_shapes(model)).bytes_per_token, 300
    else:
        spec = kv_cache.measure(model)
        if spec.num_bytes(512) == spec.num_bytes(256):
            pytest.skip("this model's requests do not grow")
        budget, max_tokens = 2 * spec.num_bytes(512) - 1, 40
    prompts = [[(7 * i + start) % tiny_models.VOCAB_SIZE for i in range(250)] for start in (1, 2)]
    engine = core(kv_budget_bytes=budget)
    answers = run(
        engine, [request(str(index), prompt, max_tokens=max_tokens) for index, prompt in enumerate(prompts)]
    )
    assert engine.scheduler.num_preemptions >= 1
    for index, prompt in enumerate(prompts):
        _assert_same(answers[str(index)].token_ids, reference(prompt, max_tokens))


def test_prefix_hits(core, case, reference):
    """Again, one that begins alike, and the next turn of a conversation."""
    engine = core()
    long = [(11 * i + 4) % tiny_models.VOCAB_SIZE for i in range(150)]
    (answer,) = run(engine, [request("first", long, max_tokens=60)]).values()
    turns = {
        "again": (long, 149 if case[1]["mode"] == "fused" else 128),
        "alike": (long[:130] + [1, 2, 3], 128),
        # Slots keep an answer's whole blocks; a state is kept behind its last token but one.
        "next turn": (long + answer.token_ids + [5, 6, 7], 192 if case[1]["mode"] == "fused" else 209),
        "other": ([9, *long], 0),
    }
    answers = run(engine, [request(name, prompt) for name, (prompt, _) in turns.items()])
    for name, (prompt, num_cached) in turns.items():
        assert answers[name].last.num_cached_tokens == num_cached, name
        _assert_same(answers[name].token_ids, reference(prompt))


def test_one_prefix_is_prefilled_once(core, reference):
    shared = [(3 * i + 1) % tiny_models.VOCAB_SIZE for i in range(200)]
    prompts = {str(i): [*shared, i, i + 1] for i in range(4)}
    answers = run(core(), [request(name, prompt) for name, prompt in prompts.items()])
    cached = sorted(answer.last.num_cached_tokens for answer in answers.values())
    assert cached == [0, 192, 192, 192]
    for name, prompt in prompts.items():
        _assert_same(answers[name].token_ids, reference(prompt))


@pytest.mark.parametrize("case", FUSED_CASES, ids=_named, indirect=True)
def test_a_prompt_sent_again_is_one_row_that_decodes(core, reference, monkeypatch):
    engine = core()
    launch, steps = engine.runner.launch, []
    monkeypatch.setattr(
        engine.runner, "launch", lambda step: steps.append(step.num_scheduled_tokens.copy()) or launch(step)
    )
    for length in (63, 64, 65, 66, 127, 128, 129, 130, 200):
        prompt = [(11 * i + length) % tiny_models.VOCAB_SIZE for i in range(length)]
        again = request("again", prompt, max_tokens=6)
        for each in (request("first", prompt, max_tokens=6), again):
            (answer,) = run(engine, [each]).values()
            _assert_same(answer.token_ids, reference(prompt, 6))
        computed = [step[again] for step in steps if again in step]
        # What is shorter than a block is not kept.
        assert answer.last.num_cached_tokens == (length - 1 if length >= 64 else 0)
        assert computed[0] == length - answer.last.num_cached_tokens
        assert set(computed[1:]) == {1}


@pytest.mark.parametrize("case", FUSED_CASES, ids=_named, indirect=True)
def test_of_equal_prompts_at_once_one_is_computed(core, reference):
    for length in (65, 128, 150):
        prompt = [(11 * i + length) % tiny_models.VOCAB_SIZE for i in range(length)]
        answers = run(core(), [request(name, prompt, max_tokens=6) for name in "abc"])
        cached = sorted(answer.last.num_cached_tokens for answer in answers.values())
        assert cached == [0, length - 1, length - 1]
        for answer in answers.values():
            _assert_same(answer.token_ids, reference(prompt, 6))


def test_the_self_check_agrees(case, model):
    if case[1]["mode"] != "serial":
        assert agrees(Reference.of(model, tiny_models.VOCAB_SIZE), Mode(case[1]["mode"]))
