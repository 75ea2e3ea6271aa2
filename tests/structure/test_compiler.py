"""Grammars of every kind: what they let through, and which are refused."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import numpy as np
import pytest

from byte_vocabulary import EOS, compiled, compiler, encode, of_schema
from vllm_metal.errors import InvalidRequest
from vllm_metal.structure import compiler as compiler_module
from vllm_metal.structure.compiler import Compiler
from vllm_metal.structure.grammar import Grammar
from vllm_metal.structure.matcher import Matcher, masks
from vllm_metal.structure.number_length import NumberLength

CALL, END_CALL, THOUGHT = 257, 258, 259


@pytest.fixture(scope="module")
def tags() -> Compiler:
    return compiler(special_tokens=("<call>", "</call>", "</think>"))


def allowed(matcher: Matcher) -> set[int]:
    [mask] = masks([matcher])
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def follows(matcher: Matcher, answer: str | list[int]) -> bool:
    """Whether `answer` may be written, and may end there."""
    for token_id in encode(answer) if isinstance(answer, str) else answer:
        if matcher.is_complete or token_id not in allowed(matcher):
            return False
        matcher.advance(token_id)
        assert matcher.error is None
    return matcher.is_complete or EOS in allowed(matcher)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (of_schema(SCHEMA), ['{"n":1}', '{"n":-2,"m":[true]}'], ["{}", '{"n":1.5}', '{ "n":1}', '{"n":1}\n']),
        (Grammar("regex", "a/b|(?i)[c-e]{2}"), ["a/b", "CD", "ee"], ["", "a", "cdd", "xcd"]),
        (Grammar("regex", "^yes$"), ["yes"], ["yes\n", "no"]),
        (Grammar("choice", '["yes","no","\\"it\\"\\n","né"]'), ["yes", '"it"\n', "né"], ["y", "yesno"]),
        (Grammar("grammar", 'root ::= "a" item*\nitem ::= [0-9] | "x" | "é"'), ["a", "a9xé"], ["", "ab"]),
        (Grammar("grammar", 'start: "a" ITEM*\nITEM: /[0-9]/ | "x"'), ["a", "a9x"], ["", "ab"]),
        (Grammar("lark", 'start: "<" %json {"enum": [1, "b"]} ">"'), ["<1>", '<"b">'], ["1", "<2>"]),
    ],
)  # fmt: skip
def test_what_follows_a_grammar(tags, grammar, right, wrong):
    grammar = compiled(grammar, tags)
    for answer in right:
        assert follows(grammar.matcher(), answer), answer
    for answer in wrong:
        assert not follows(grammar.matcher(), answer), answer


def structural_tag(*structures: tuple[str, object, str], triggers: list[str]) -> Grammar:
    asked = [{"begin": begin, "schema": schema, "end": end} for begin, schema, end in structures]
    return Grammar("structural_tag", json.dumps({"structures": asked, "triggers": triggers}))


def test_tags_in_free_text(tags):
    number = {"type": "integer"}
    grammar = compiled(
        structural_tag(
            ("<fn=one>", number, "</fn>"), ("<fn=two>", {"enum": ["a"]}, "</fn>"), ("{x", number, "}"),
            triggers=["<fn=", "{x"],
        ),
        tags,
    )  # fmt: skip
    for answer in ("", "Well.", "<fn=one>7</fn>", 'So <fn=two>"a"</fn>\nand {x9} <fn=one>1</fn> done', "<fn"):
        assert follows(grammar.matcher(), answer), answer
    for answer in ("<fn=three>", "<fn=one>x", '<fn=one>"a"</fn>', "{x}", "a <fn=one>7</fn", "<fn=one>7 "):
        assert not follows(grammar.matcher(), answer), answer


def test_special_tokens_in_tags_are_those_tokens(tags):
    grammar = compiled(
        structural_tag(('<call>{"n":', {"type": "integer"}, "}</call>"), triggers=["<call>"]), tags
    )
    call = [CALL, *encode('{"n":12}'), END_CALL]
    for answer in ([], call, [*encode("I will. "), *call, *call, *encode(" Done.")], encode("<call>")):
        assert follows(grammar.matcher(), answer), answer
    for answer in ([CALL], [CALL, *encode("{}")], call[:-1], [END_CALL], [*call[:-1], *encode("</call>")]):
        assert not follows(grammar.matcher(), answer), answer


def test_a_prefix_comes_first(tags):
    grammar = Grammar("json_schema", '{"type":"integer"}', prefix=rf"/(.|\n)*/ <[{THOUGHT}]>")
    grammar = compiled(grammar, tags)
    assert follows(grammar.matcher(), [*encode('hm,\n"7"?'), THOUGHT, *encode("7")])
    assert not follows(grammar.matcher(), "7")
    assert not follows(grammar.matcher(), [THOUGHT, *encode("x")])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (of_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (of_schema({"type": "thing"}), "Invalid type: thing"),
        (of_schema({"$ref": "http://localhost/x"}), "not present"),
        (of_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", "\ud800"), "surrogates"),
        (Grammar("regex", "a*b?" * 10_000), "too big"),
        (Grammar("grammar", f"start: /{'(.*)' * 10_000}/"), "too big"),
        (Grammar("choice", '["\\ud800"]'), "hex escape"),
        (Grammar("grammar", "root ::= )"), "line 1"),
        (Grammar("grammar", "("), "neither GBNF nor Lark"),
        (Grammar("grammar", ""), "root"),
        (Grammar("lark", "start: start"), "NoExtension"),
        (Grammar("lark", 'start: "a" %json {"properties": 5}\nb: "b"'), "must be an object"),
        (structural_tag(("<a>", {}, ""), triggers=["<b>"]), "triggers"),
        (structural_tag(("<a>", {}, ""), triggers=["<a>", "<b>"]), "<b>"),
        (structural_tag(("<a>", {"type": 1}, ""), triggers=["<a"]), "type"),
    ],
)  # fmt: skip
def test_a_refusal_says_why_and_harms_no_other(tags, grammar, reason):
    with pytest.raises(InvalidRequest) as refused:
        compiled(grammar, tags)
    assert refused.value.param == grammar.param
    assert reason in refused.value.message
    assert "\n" not in refused.value.message
    assert not re.search(r"\d \| |\^\^", refused.value.message)
    assert follows(compiled(Grammar("choice", '["yes"]'), tags).matcher(), "yes")


PATHOLOGICAL = {
    "bytes that pile up": Grammar("regex", "(a?){1,5000}a{5000}"),
    "states that double": Grammar("regex", "(.|\n)*a(.|\n){3000}b(.|\n)*"),
    "repeats of repeats": Grammar("regex", "((([a-z]{1,1000}){1,1000}){1,1000}){1,1000}"),
    "many choices": Grammar("choice", json.dumps([f"number {7919 * i}" for i in range(30_000)])),
    "an ambiguous grammar": Grammar("lark", 'start: s\ns: s s s | s s | /[a-z]+/ | /[a-z]/ | "a" | '),
    "deep nesting": of_schema(json.loads('{"type":"array","items":' * 500 + "{}" + "}" * 500)),
    "many properties": of_schema({"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}),
    "all of any": of_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]}
    ),
    "patterns that cross": of_schema(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*{c}(a|b|c|d|e){{{15}}}"} for c in "abcde"]}
    ),
    "a schema that is itself": of_schema({"$ref": "#"}),
    "long arrays": of_schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_what_would_take_for_ever_is_given_up(tags, name):
    """It is refused, or its answers can be written or end with an error of their own."""
    source = np.random.default_rng(0)
    try:
        matcher = compiled(PATHOLOGICAL[name], tags).matcher()
    except InvalidRequest:
        return
    for _ in range(40):
        if matcher.error or matcher.is_complete:
            break
        matcher.advance(int(source.choice(sorted(allowed(matcher)))))


def test_an_object_of_many_properties(tags):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    assert follows(compiled(of_schema(schema), tags).matcher(), '{"p3":1,"p998":-2}')


def test_time_is_bounded(tags, monkeypatch):
    """Whoever waits is told; others compile meanwhile."""
    going, translate = threading.Event(), compiler_module.lark.translate

    def slow(grammar, special_token_ids):
        if grammar.source == "slow":
            assert going.wait(60)
        return translate(grammar, special_token_ids)

    async def talk() -> None:
        monkeypatch.setattr(compiler_module, "TIMEOUT_S", 0.05)
        with pytest.raises(InvalidRequest, match="to compile"):
            await tags.compile(Grammar("regex", "slow", param="guided_regex"))
        monkeypatch.setattr(compiler_module, "TIMEOUT_S", 60)
        assert follows((await tags.compile(Grammar("regex", "quick"))).matcher(), "quick")

    monkeypatch.setattr(compiler_module.lark, "translate", slow)
    try:
        asyncio.run(talk())
    finally:
        going.set()


def test_the_same_grammar_is_compiled_once(tags):
    asked = [of_schema({"const": 1}), of_schema({"const": 1}), of_schema({"const": 2})]
    first, same, other = [compiled(grammar, tags) for grammar in asked]
    assert first is same
    assert first is not other


def test_a_tokenizer_that_is_not_understood():
    unread = Compiler(lambda: "{}", added_tokens={}, eos_token_ids=())
    with pytest.raises(InvalidRequest, match="tokenizer cannot be held to a grammar"):
        compiled(Grammar("regex", "a"), unread)


def test_numbers_end_and_strings_need_not(tags):
    schema = {"type": "array", "items": {"type": ["number", "string"]}}

    def longest(before: str, digit: str) -> int:
        matcher = compiled(of_schema(schema), tags).matcher()
        for token_id in encode(before):
            matcher.advance(token_id)
        for length in range(100):
            if ord(digit) - ord("!") not in allowed(matcher):
                return length
            matcher.advance(ord(digit) - ord("!"))
        return 100

    assert encode("0") == [ord("0") - ord("!")]
    assert longest("[", "7") == 32
    assert longest("[-", "7") == 31
    assert longest("[1.", "0") == 30
    assert longest("[12,", "7") == 32
    assert longest('["', "7") == 100
    assert longest('["\\"', "7") == 100
    assert longest('["a\\\\",', "7") == 32


def test_a_number_that_may_not_end_goes_on():
    number = NumberLength(lambda token_id: b"7" * token_id, going_on=np.array([0b110], np.int32))
    number.feed(40)
    for mask, bounded in ((0b111, 0b001), (0b110, 0b110)):
        allowed = np.array([mask], np.int32)
        number.bound(allowed)
        assert allowed.tolist() == [bounded]
