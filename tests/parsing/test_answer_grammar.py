"""Grammars of calls and reasoning: models may write what they always do, and nothing that cannot be read."""

from __future__ import annotations

import json
import random
from functools import cache, partial
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

import tiny_folder
from tool_call_writers import TOOL, WRITERS
from vllm_metal.parsing import answer_grammar
from vllm_metal.parsing.answer import Answer
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_formats import REASONING_FORMATS
from vllm_metal.parsing.tool_formats import TOOL_FORMATS
from vllm_metal.structure import lark
from vllm_metal.structure.grammar import Grammar

NAME = "get_weather"
NO_GRAMMAR = {"gemma4", "function_gemma", "kimi_k3", "lfm2", "pythonic"}
WRITTEN = sorted(TOOL_FORMATS.keys() - NO_GRAMMAR)
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "stop", "parameters": NOTHING}}


class Vocabulary:
    """A token a byte, and the marks of a format, if they are to be tokens."""

    def __init__(self, special_tokens: frozenset[str]) -> None:
        self.backend = tiny_folder.tokenizer().backend_tokenizer
        self.backend.add_special_tokens(sorted(special_tokens))
        self._tokenizer = LLTokenizer(self.backend.to_str(), eos_token=256)
        self.special_token_ids = {token: self.backend.token_to_id(token) for token in special_tokens}
        self.literal = partial(lark.literal, special_token_ids=self.special_token_ids)

    def matcher(self, source: str, prefix: str = "") -> LLMatcher:
        grammar = lark.translate(Grammar("lark", source, prefix=prefix), self.special_token_ids)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, matcher: LLMatcher, text: str) -> bool:
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def text(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


@cache
def vocabulary(name: str, *, special: bool) -> Vocabulary:
    marks = TOOL_FORMATS[name].visible_tokens if special else frozenset({"</s>"})
    return Vocabulary(marks)


def calls(name: str, tools: list[Any], *, special: bool = True, several: bool = True) -> LLMatcher:
    vocab = vocabulary(name, special=special)
    grammar = answer_grammar.calls(TOOL_FORMATS[name], tools, vocab.literal, several=several)
    assert grammar is not None
    return vocab.matcher(grammar)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_models_write_is_allowed(name: str, special: bool) -> None:
    if name == "mistral" and not special:
        pytest.skip("without its tokens it writes otherwise")
    write, vocab = WRITERS[name], vocabulary(name, special=special)
    one = [(NAME, {"place": 'a "b" 日本', "days": 3})]
    without = [(NAME, {})]
    for written in (one, without) + ((one + without,) if TOOL_FORMATS[name].several else ()):
        text = write(written)
        text = text.removesuffix("<|call|>").removeprefix("```json\n").removesuffix("\n```")
        assert vocab.accepts(calls(name, [OTHER, TOOL], special=special), text), text
    assert not vocab.accepts(calls(name, [OTHER], special=special), write(one))
    assert not vocab.accepts(calls(name, [TOOL], special=special, several=False), write(one + one))
    assert not vocab.accepts(calls(name, [TOOL], special=special), "Well, " + write(one))


STRICT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["kind", "seats"],
            "properties": {
                "note": {"type": "string", "maxLength": 8},
                "seats": {"type": "integer", "minimum": 1, "maximum": 99},
                "kind": {"enum": ["bus", "train"]},
                "to": {"$ref": "#/$defs/place"},
                "gone": {"type": ["boolean", "null"]},
            },
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "boolean"}},
                    "required": ["x"],
                    "additionalProperties": False,
                },
            },
        },
    },
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", WRITTEN)
def test_whatever_is_allowed_is_read_and_follows_the_schema(name: str, seed: int) -> None:
    vocab, choices = vocabulary(name, special=True), random.Random(seed)
    matcher = calls(name, [STRICT, OTHER])
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 3000:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        # Plain text, which no model ends at random, ends soon.
        allowed = [i for i in np.unpackbits(bits, bitorder="little").nonzero()[0].tolist() if i != 256]
        if matcher.is_accepting() and (not allowed or choices.random() < 0.5):
            break
        marks = [i for i in allowed if i > 256 or vocab.text([i]) in '"}<]`\n,']
        pool = (
            marks
            if marks and choices.random() < 0.5
            else [i for i in allowed if vocab.text([i]).isprintable()]
        )
        ids.append(choices.choice(pool or allowed))
        assert matcher.consume_token(ids[-1])
    assert matcher.is_accepting(), vocab.text(ids)
    parser = OutputParser(tool_format=TOOL_FORMATS[name], tools=[STRICT, OTHER])
    answer = Answer.of(parser.feed(vocab.text(ids)) + parser.finish())
    assert answer.tool_calls, vocab.text(ids)
    assert not answer.content.strip()
    for call in answer.tool_calls:
        assert call.complete
        arguments = json.loads(call.arguments)
        if call.name == "book":
            schema = STRICT["function"]["parameters"]
            if TOOL_FORMATS[name].parameter.text:
                arguments["note"] = ""  # Of text that is no JSON, only enumerations are held to.
            jsonschema.validate(arguments, schema)
        else:
            assert (call.name, arguments) == ("stop", {})


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("special", [True, False])
def test_reasoning_may_come_first(name: str, special: bool) -> None:
    reasoning = REASONING_FORMATS[name]
    vocab = Vocabulary(reasoning.visible_tokens if special else frozenset({"</s>"}))
    thought = f"{reasoning.begin}Hm {{ it </b>.{reasoning.end}\n\n{reasoning.resume}"
    answer = f'{reasoning.content_begin}{{"a":1}}'
    for begun, right, wrong in (
        (False, [answer, thought + answer], ["Hm" + answer, thought]),
        (True, [thought.removeprefix(reasoning.begin) + answer], [answer, "Hm"]),
    ):
        prefix = answer_grammar.reasoning_first(reasoning, vocab.literal, begun=begun, before_content=True)
        for text in right + wrong:
            matcher = vocab.matcher('start: %json {"enum": [{"a": 1}]}', prefix)
            assert vocab.accepts(matcher, text) == (text in right), text


@pytest.mark.parametrize("name", sorted(NO_GRAMMAR))
def test_some_formats_are_only_read(name: str) -> None:
    assert answer_grammar.calls(TOOL_FORMATS[name], [TOOL], json.dumps, several=True) is None
