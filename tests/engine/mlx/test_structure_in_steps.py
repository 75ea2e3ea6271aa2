"""Answers held to grammars come out the same however steps are run, and leave their neighbours alone."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

import tiny_models
from byte_vocabulary import EOS, TOKENIZER, compiled, compiler, encode, of_schema
from engine_driver import MODES, Answer, make_core, request, run, solo
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.request import Request
from vllm_metal.structure import compiler as compiler_module
from vllm_metal.structure.grammar import Grammar

EOS_IDS = frozenset({EOS})
NUM_SCHEMAS = 300
NUM_AT_ONCE = 25

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
QUOTE, COMMA = encode('",')

COMPILER = compiler()
ASKED: dict[str, dict[str, Any]] = {
    name: {**params, "grammar": compiled(grammar, COMPILER)}
    for name, grammar, params in [
        ("schema", of_schema(PERSON), {"temperature": 1.0}),
        ("greedy schema", of_schema(PERSON), {}),
        ("regex", Grammar("regex", "[a-c]{3}x+y{2,}"), {"temperature": 1.0}),
        ("choice", Grammar("choice", '["yes","no","maybe"]'), {"temperature": 1.0}),
        ("grammar", Grammar("grammar", 'root ::= "a" ("b" | "c")* "d"'), {"temperature": 1.0}),
        (
            "biased",
            Grammar("regex", "[a-z]+!"),
            {"logit_bias": tuple((token_id, 4.0) for token_id in encode("xyz")), "temperature": 1.0},
        ),
        (
            "with bad words",
            Grammar("regex", "[ab]{12}"),
            {"bad_words": (tuple(encode("aa")), tuple(encode("bb"))), "temperature": 1.0},
        ),
        (
            "with allowed tokens",
            Grammar("regex", "[a-z]{8}"),
            {"allowed_token_ids": tuple(encode("aeiou,!")), "temperature": 1.0},
        ),
        (
            "penalized",
            Grammar("regex", "[a-h]{16}"),
            {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
        ),
        ("told", of_schema(PERSON), {"logprobs": 3, "temperature": 0.9, "top_k": 20, "top_p": 0.9}),
        ("patient", Grammar("regex", "[ab]*"), {"min_tokens": 9, "temperature": 1.0}),
        ("cut off", Grammar("regex", "[a-z]+!"), {"allowed_token_ids": tuple(encode("abc!"))[:3]}),
    ]
}
ASKED["free"] = {"temperature": 1.0}
ASKED["free and greedy"] = {"logprobs": 2}


def requests() -> list[Request]:
    return [
        request(
            name, [(7 * i + number) % 256 for i in range(number + 2)], max_tokens=60, seed=number, **params
        )
        for number, (name, params) in enumerate(ASKED.items())
    ]


def text(answer: Answer) -> str:
    return TOKENIZER.decode(answer.token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def model():
    return tiny_models.make("llama")


@pytest.fixture(scope="module")
def alone(model) -> dict[str, Answer]:
    return {each.request_id: solo(model, each, eos_token_ids=EOS_IDS) for each in requests()}


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert (name, answer.token_ids) == (name, expected[name].token_ids)
        assert answer.last.finish_reason == expected[name].last.finish_reason
        for got, wanted in zip(answer.logprobs, expected[name].logprobs, strict=True):
            assert got.token_id == wanted.token_id
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-3)


def test_alone_they_do_what_they_say(alone):
    for name in ("schema", "greedy schema", "told"):
        assert alone[name].last.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(text(alone[name])), PERSON)
    for name, pattern in [
        ("regex", "[a-c]{3}x+y{2,}"), ("choice", "yes|no|maybe"), ("grammar", "a[bc]*d"),
        ("biased", "[a-z]+!"), ("with bad words", "(ab){6}|(ba){6}"), ("with allowed tokens", "[aeiou]{8}"),
        ("penalized", "[a-h]{16}"), ("patient", "[ab]{9,}"),
    ]:  # fmt: skip
        answer = text(alone[name])
        if alone[name].last.finish_reason is FinishReason.LENGTH:
            assert name in ("regex", "patient", "biased", "grammar")
            continue
        assert re.fullmatch(pattern, answer), (name, answer)
    assert set(text(alone["biased"])) & set("xyz")
    assert set(text(alone["penalized"])) == set("abcdefgh")
    assert alone["cut off"].last.finish_reason is FinishReason.LENGTH
    assert len(alone["cut off"].token_ids) == 60


@pytest.mark.parametrize("steps_between", [0, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("mode", MODES)
def test_batched_chunked_and_ahead_as_alone(model, alone, mode, overlap, steps_between):
    core = make_core(
        model,
        **MODES[mode],
        overlap=overlap,
        eos_token_ids=EOS_IDS,
        max_num_seqs=16,
        max_num_batched_tokens=16,
    )
    assert_same(run(core, requests(), steps_between=steps_between), alone)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_preempted(model, overlap):
    def pair() -> list[Request]:
        grammar = compiled(Grammar("regex", "([a-d]{10}-){3}[a-d]{7}"), COMPILER)
        return [
            request(
                str(seed),
                [(7 * i + seed) % 256 for i in range(250)],
                max_tokens=60,
                seed=seed,
                temperature=1.0,
                presence_penalty=0.5,
                grammar=grammar if seed == 1 else None,
            )
            for seed in (1, 2)
        ]

    spec = kv_cache.measure(model)
    core = make_core(model, overlap=overlap, kv_budget_bytes=2 * spec.num_bytes(512) - 1)
    answers = run(core, pair())
    assert core.scheduler.num_preemptions >= 1
    assert_same(answers, {each.request_id: solo(model, each) for each in pair()})
    assert re.fullmatch("([a-d]{10}-){3}[a-d]{7}", text(answers["1"]))


@pytest.mark.parametrize("fails", ["launch", "sample", "read"])
@pytest.mark.parametrize("mode", ["split", "fused"])
def test_computed_again_after_a_failed_step(model, alone, mode, fails):
    core = make_core(model, mode=mode, overlap=True, eos_token_ids=EOS_IDS, max_num_seqs=16)
    launch, num_launches = core.runner.launch, 0

    def fail() -> None:
        raise RuntimeError("out of memory")

    def failing(output):
        nonlocal num_launches
        num_launches += 1
        step = launch(output)
        if num_launches == 7:
            if fails == "launch":
                fail()
            setattr(step, fails, fail)
        return step

    core.runner.launch = failing
    assert_same(run(core, requests()), alone)
    assert core.scheduler.num_preemptions >= len(ASKED) - 1


def test_no_grammar_no_waiting(model):
    """Steps are sampled before the tokens before are read, but for those with a grammar."""
    for grammar in (None, ASKED["schema"]["grammar"]):
        core = make_core(model, overlap=True, eos_token_ids=EOS_IDS)
        core.add_request(request("a", [1, 2, 3], grammar=grammar, max_tokens=30))
        core.step()
        scheduled = core.scheduler.schedule()
        [launched] = scheduled.num_scheduled_tokens
        assert launched.num_pending_tokens == 1
        step = core.runner.launch(scheduled)
        assert bool(step._unbegun) == (grammar is None)


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_a_grammar_that_becomes_too_complex_ends_its_own_request(model, monkeypatch, overlap, alone):
    monkeypatch.setattr(compiler_module, "_LIMITS", partial(LLParserLimits, max_items_in_row=8))
    many = " | ".join(f'"y" "{i}"' for i in range(99))
    grammar = compiled(Grammar("lark", f'start: "xx" ({many})'), compiler())
    complex_one = request("complex", [1, 2], temperature=1.0, grammar=grammar, max_tokens=80)
    simple = request("simple", [1, 2], temperature=1.0, grammar=ASKED["schema"]["grammar"], max_tokens=80)
    core = make_core(model, overlap=overlap, eos_token_ids=EOS_IDS)
    answers = run(core, [complex_one] if alone else [complex_one, simple])
    assert answers["complex"].last.finish_reason is FinishReason.ERROR
    assert "too complex" in answers["complex"].last.error
    assert alone or answers["simple"].last.finish_reason is FinishReason.STOP
    assert core.scheduler.num_preemptions == 0


def test_what_is_allowed_by_nothing_ends_its_own_request(model):
    grammar = ASKED["choice"]["grammar"]
    [token_id] = encode("q")
    answers = run(
        make_core(model, overlap=True),
        [request("none", [1, 2], grammar=grammar, allowed_token_ids=(token_id,)), request("all", [1, 2])],
    )
    assert "allows none of the tokens" in answers["none"].last.error
    assert answers["all"].last.finish_reason is FinishReason.LENGTH


def any_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """One whose answers are of bounded length, since a random model ends no string of its own accord."""
    simple = ["string", "pattern", "enum", "integer", "number", "boolean", "null", "const", "date"]
    kind = source.choice(simple if depth == 3 else [*simple, "array", "array", "anyOf", *4 * ["object"]])
    match kind:
        case "string":
            least = source.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + source.randrange(6)}
        case "pattern":
            return {
                "type": "string",
                "pattern": source.choice(["^[A-Z]{2,4}$", "^a+b{3}$", r"^\d{3}-\d{4}$"]),
            }
        case "enum":
            return {
                "enum": source.sample(["a", "b\n", "é", 'say "it"', 1, -2.5, True, None, "longer text"], 3)
            }
        case "integer":
            least = source.randrange(-1000, 1000)
            bounds = {"minimum": least, "exclusiveMaximum": least + source.randrange(1, 500)}
            return {
                "type": "integer",
                **bounds,
                **({"multipleOf": 5} if bounds["exclusiveMaximum"] > least + 9 else {}),
            }
        case "number":
            return {"type": "number", "minimum": source.randrange(-9, 9), "maximum": 9.5}
        case "const":
            return {"const": source.choice(["x", 0, False, [1, {"a": []}]])}
        case "date":
            return {"type": "string", "format": source.choice(["date", "time", "uuid", "ipv4"])}
        case "array":
            least = source.randrange(3)
            prefix = [any_schema(source, depth + 1) for _ in range(source.randrange(3))]
            return {
                "type": "array",
                **({"prefixItems": prefix} if prefix else {}),
                "items": any_schema(source, depth + 1),
                "minItems": least,
                "maxItems": least + source.randrange(3),
            }
        case "anyOf":
            return {"anyOf": [any_schema(source, depth + 1) for _ in range(source.randrange(1, 4))]}
        case "object":
            names = source.sample(
                ["id", "name", "a b", "größe", 'quo"ted', "x_1", "list"], source.randrange(5)
            )
            properties = {name: any_schema(source, depth + 1) for name in names}
            required = [name for name in names if source.random() < 0.7]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
    return {"type": kind}


@pytest.mark.parametrize("mode", ["fused", "split"])
def test_generated_schemas_beside_free_neighbours(model, mode):
    """Eight at a time, half of the free ones greedy. What ends by itself is valid."""
    source = random.Random(mode)
    num_ended = 0
    schemas = [any_schema(source) for _ in range(NUM_SCHEMAS // 2)]
    for start in range(0, len(schemas), NUM_AT_ONCE):
        batch = schemas[start : start + NUM_AT_ONCE]
        held = [
            request(str(i), [i + 1, start % 256], max_tokens=150, seed=i, temperature=1.0,
                    grammar=compiled(of_schema(schema), COMPILER))
            for i, schema in enumerate(batch)
        ]  # fmt: skip

        def free() -> list[Request]:
            return [
                request(f"free {i}", [7, i], max_tokens=50, seed=i, temperature=i % 2, ignore_eos=True)
                for i in range(8)
            ]

        core = make_core(
            model, mode=mode, overlap=True, eos_token_ids=EOS_IDS, max_num_seqs=8, max_num_batched_tokens=32
        )
        mixed = [each for pair in zip(held[:8], free(), strict=True) for each in pair] + held[8:]
        answers = run(core, mixed)
        for i, schema in enumerate(batch):
            answer = answers[str(i)]
            if answer.last.finish_reason is FinishReason.STOP:
                num_ended += 1
                jsonschema.validate(json.loads(text(answer)), schema, jsonschema.Draft202012Validator)
            else:
                assert (schema, answer.last.finish_reason) == (schema, FinishReason.LENGTH)
        if start == 0:
            expected = {each.request_id: solo(model, each, eos_token_ids=EOS_IDS) for each in free()}
        assert_same({name: answers[name] for name in expected}, expected)
    assert num_ended > 0.8 * len(schemas)
