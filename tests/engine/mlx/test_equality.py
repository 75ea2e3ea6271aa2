"""In float32 a request's tokens are the same alone, batched, in chunks of any size, and preempted."""

from __future__ import annotations

import mlx.core as mx
import pytest

import tiny_models
from engine_driver import make_core, request, run, solo
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.mlx.self_check import batches_agree

PROMPTS = [
    [(13 * i + 5) % tiny_models.VOCAB_SIZE for i in range(40)],
    [7],
    [(5 * i + 1) % tiny_models.VOCAB_SIZE for i in range(9)],
    [3, 1, 4, 1, 5],
    [(3 * i + 2) % tiny_models.VOCAB_SIZE for i in range(23)],
]


@pytest.fixture(scope="module", params=tiny_models.CONFIGS)
def model(request):
    return tiny_models.make(request.param)


def _reference(model, prompt, max_tokens):
    """Greedy tokens by mlx-lm's own single-sequence caches, and the top-2 gap behind each."""
    caches = kv_cache.new_caches(model)
    logits = model(mx.array([prompt]), cache=caches)[0, -1]
    token_ids, gaps = [], []
    for _ in range(max_tokens):
        best = mx.sort(logits)
        token_ids.append(mx.argmax(logits).item())
        gaps.append((best[-1] - best[-2]).item())
        logits = model(mx.array([[token_ids[-1]]]), cache=caches)[0, -1]
    return token_ids, gaps


def _assert_same(token_ids, reference):
    expected, gaps = reference
    for index, (got, wanted) in enumerate(zip(token_ids, expected, strict=True)):
        if got != wanted:
            assert gaps[index] < 1e-3, f"token {index} differs with a top-2 gap of {gaps[index]}"
            return


@pytest.fixture(scope="module")
def references(model):
    return [_reference(model, prompt, 12) for prompt in PROMPTS]


def test_alone(model, references):
    for prompt, reference in zip(PROMPTS, references, strict=True):
        _assert_same(solo(model, request("r", prompt)).token_ids, reference)


@pytest.mark.parametrize("steps_between", [0, 1, 5])
def test_batched_joining_and_leaving_at_any_step(model, references, steps_between):
    requests = [
        request(str(index), prompt, max_tokens=12 - 2 * (index % 3)) for index, prompt in enumerate(PROMPTS)
    ]
    answers = run(make_core(model), requests, steps_between=steps_between)
    for index, (expected, gaps) in enumerate(references):
        length = requests[index].max_tokens
        assert len(answers[str(index)].token_ids) == length
        _assert_same(answers[str(index)].token_ids, (expected[:length], gaps))


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunked(model, references, chunk):
    core = make_core(model, max_num_seqs=1, max_num_batched_tokens=chunk)
    answers = run(core, [request(str(index), prompt) for index, prompt in enumerate(PROMPTS)])
    for index, reference in enumerate(references):
        _assert_same(answers[str(index)].token_ids, reference)


def test_preempted(model):
    """Room for two requests of one KV step; both grow past it, so the later one must be computed again."""
    prompts = [[(7 * i + start) % tiny_models.VOCAB_SIZE for i in range(250)] for start in (1, 2)]
    references = [_reference(model, prompt, 12) for prompt in prompts]
    spec = kv_cache.measure(model)
    budget = (
        2 * spec.num_bytes(512) - 1
        if spec.num_bytes(512) > spec.num_bytes(256)
        else 2 * spec.num_bytes(1) - 1
    )
    core = make_core(model, kv_budget_bytes=budget)
    answers = run(core, [request(str(index), prompt) for index, prompt in enumerate(prompts)])
    if spec.num_bytes(512) > spec.num_bytes(256):
        assert core.scheduler.num_preemptions >= 1
    for index, reference in enumerate(references):
        _assert_same(answers[str(index)].token_ids, reference)


def test_row_by_row(model, references):
    core = make_core(model, batched=False)
    answers = run(
        core, [request(str(index), prompt) for index, prompt in enumerate(PROMPTS)], steps_between=1
    )
    for index, reference in enumerate(references):
        _assert_same(answers[str(index)].token_ids, reference)


def test_self_check_agrees(model):
    assert batches_agree(model, tiny_models.VOCAB_SIZE)
