"""Requests with different adapters, side by side, say what each says alone on mlx-lm's own LoRA layers."""

from __future__ import annotations

import gc

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.utils import load_adapters

import adapter_writer
import tiny_models
from engine_driver import MODES, make_core, request, run
from vllm_metal.engine.mlx import adapted_layers, adapters, kv_cache, linear
from vllm_metal.engine.mlx.self_check import Mode, Reference, agrees

PROMPTS = [
    [(13 * i + 5) % tiny_models.VOCAB_SIZE for i in range(40)],
    [(5 * i + 1) % tiny_models.VOCAB_SIZE for i in range(9)],
    [3, 1, 4, 1, 5],
    [(3 * i + 2) % tiny_models.VOCAB_SIZE for i in range(23)],
]
#: Two use the first adapter, one the second, one none.
ADAPTERS = [1, 2, 0, 1]
#: Of different ranks, of different layers.
HOW = [{"seed": 1}, {"seed": 2, "rank": 7, "only": ("q_proj", "v_proj", "down_proj")}]
#: On a GPU the engine is one step ahead.
HOWS = {mode: how | {"overlap": "static" in how} for mode, how in MODES.items()}


def make(name: str, bits: int | None) -> nn.Module:
    model = tiny_models.make(name)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    return model


@pytest.fixture(
    params=[("qwen3", None), ("llama", 4), ("gemma3_text", None), ("qwen3_moe", None), ("gpt_oss", 4)],
    ids=lambda param: param[0],
)
def make_model(request):
    return lambda: make(*request.param)


@pytest.fixture
def folders(tmp_path, make_model):
    return [
        adapter_writer.write_mlx(tmp_path / str(how["seed"]), adapter_writer.matrices(make_model(), **how))
        for how in HOW
    ]


@pytest.fixture
def adapted(make_model, folders):
    """A model with both adapters."""
    model = make_model()
    adapted_layers.install(model, folders, mx.float32)
    return model


def _greedy(model, prompt, max_tokens=12):
    """By mlx-lm's own single-sequence caches."""
    caches = kv_cache.new_caches(model)
    logits = model(mx.array([prompt]), cache=caches)[0, -1]
    token_ids = []
    for _ in range(max_tokens):
        token_ids.append(mx.argmax(logits).item())
        logits = model(mx.array([[token_ids[-1]]]), cache=caches)[0, -1]
    return token_ids


@pytest.fixture
def expected(make_model, folders):
    models = [make_model(), *(load_adapters(make_model(), str(folder)) for folder in folders)]
    for model in models:
        model.eval()
    return [_greedy(models[adapter], prompt) for prompt, adapter in zip(PROMPTS, ADAPTERS, strict=True)]


def _requests():
    return [request(str(i), PROMPTS[i], adapter=ADAPTERS[i]) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_rows_of_one_batch_use_different_adapters(adapted, expected, how):
    # Enough tokens at a time for a mixture of experts to sort them.
    core = make_core(adapted, max_num_batched_tokens=48, **how)
    answers = run(core, _requests(), steps_between=1)
    assert [answers[str(i)].token_ids for i in range(len(PROMPTS))] == expected
    # Steps of shapes that were met before, which one for a GPU replays.
    again = run(core, _requests()[::-1], steps_between=1)
    assert [again[str(i)].token_ids for i in range(len(PROMPTS))] == expected


def test_the_adapters_change_what_is_said(make_model, expected):
    base = [_greedy(make_model(), prompt) for prompt in PROMPTS]
    assert [ours == plain for ours, plain in zip(expected, base, strict=True)] == [False, False, True, False]


@pytest.mark.parametrize("mode", ["fused", "split"])
def test_kept_prefixes_are_of_one_adapter(adapted, mode):
    prompt = [(11 * i + 3) % tiny_models.VOCAB_SIZE for i in range(200)]
    core = make_core(adapted, mode=mode)
    cached = []
    for which, adapter in enumerate([0, 1, 2, 1, 2, 0]):
        answer = run(core, [request(str(which), prompt, adapter=adapter)])[str(which)]
        cached.append(answer.last.num_cached_tokens)
        alone = run(make_core(adapted, mode=mode), [request("alone", prompt, adapter=adapter)])["alone"]
        assert answer.token_ids == alone.token_ids
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= 64


@pytest.mark.parametrize("mode", ["fused", "split"])
def test_a_prompt_does_not_wait_for_one_of_another_adapter(adapted, mode):
    prompt = [(11 * i + 3) % tiny_models.VOCAB_SIZE for i in range(200)]
    core = make_core(adapted, mode=mode)
    answers = run(core, [request("a", prompt, adapter=1), request("b", prompt, adapter=2)])
    assert [answers[name].last.num_cached_tokens for name in "ab"] == [0, 0]


def test_without_adapters_layers_are_left_alone(make_model):
    model = make_model()
    before = [type(module) for _, module in model.named_modules()]
    assert adapters.of(model) is adapters.of(model)
    run(make_core(model, mode="split"), [request("a", PROMPTS[0])])
    assert [type(module) for _, module in model.named_modules() if isinstance(module, nn.Linear)] == [
        each for each in before if issubclass(each, nn.Linear)
    ]


def test_a_step_without_an_adapter_costs_nothing_more(adapted, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("an adapter was looked at")

    monkeypatch.setattr(adapters.Adapters, "only_own", refuse)
    for how in HOWS.values():
        plain = [request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
        assert len(run(make_core(adapted, **how), plain)) == len(PROMPTS)


def test_rows_may_be_folded_into_one_sequence(adapted, expected):
    linear.flatten_rows(adapted)
    answers = run(make_core(adapted, mode="fused", max_num_batched_tokens=48), _requests())
    assert [answers[str(i)].token_ids for i in range(len(PROMPTS))] == expected


def test_the_memory_of_adapters_goes_with_the_model(make_model, folders):
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        model = make_model()
        adapted_layers.install(model, folders, mx.float32)
        assert mx.get_active_memory() > before
        del model
        assert mx.get_active_memory() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", [Mode.FUSED, Mode.SPLIT])
def test_the_self_check_runs_with_adapters(adapted, mode, monkeypatch):
    looked_at = []
    only_own = adapters.Adapters.only_own

    def watched(self, columns, ranks, **options):
        looked_at.append(ranks)
        return only_own(self, columns, ranks, **options)

    monkeypatch.setattr(adapters.Adapters, "only_own", watched)
    assert agrees(Reference.of(adapted, tiny_models.VOCAB_SIZE), mode)
    assert looked_at
