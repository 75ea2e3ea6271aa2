"""Answers held to a structure: every way to ask, what is refused, and what becomes of the others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

import streamed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
UNSUPPORTED = {"name": "x", "schema": {"$ref": "#/a"}}
NAMED = {"name": "person", "schema": SCHEMA, "strict": True}
TAG = {"structures": [{"begin": "<n>", "schema": {"enum": [7]}, "end": "</n>"}], "triggers": ["<"]}
#: Where there is no text to write between the tags: the ids of `<` and the end of the answer.
ONLY_TAGS = {"logit_bias": {"27": 100}, "max_tokens": 8}


def ask(server: Any, path: str = CHAT, **fields: Any) -> tuple[int, Any]:
    prompt = (
        {"prompt": "Once"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Once"}]}
    )
    return server.post(path, {**prompt, "seed": 1, "temperature": 1, "max_tokens": 80, **fields})


def answers(server: Any, path: str = CHAT, **fields: Any) -> list[str]:
    status, reply = ask(server, path, **fields)
    assert status == 200, reply
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}, reply
    return [
        choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in reply["choices"]
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "disable_any_whitespace": False}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]{1,2}"},
    ],
    ids=lambda fields: "-".join(fields),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_schemas(tiny_server, path, fields):
    [answer] = answers(tiny_server, path, **fields)
    jsonschema.validate(json.loads(answer), SCHEMA)


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ({}, '{"name": "        ", "n": '),
        ({"disable_any_whitespace": True}, '{"name":"        ","n":'),
        ({"whitespace_pattern": " {2}"}, '{  "name"  :  "        "  ,  "n"  :  '),
    ],
)
def test_whitespace_is_bounded(tiny_server, options, begins):
    # The id of a space: it is written wherever it may be.
    asked = {"structured_outputs": {"json": SCHEMA, **options}, "temperature": 0}
    [answer] = answers(tiny_server, logit_bias={"220": 100}, **asked)
    assert answer.startswith(begins)


def test_objects_have_no_other_properties(tiny_server):
    a = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    open_schema = {"oneOf": [a]}
    closing = {"json": open_schema, "disable_additional_properties": True}
    [answer] = answers(tiny_server, structured_outputs=closing)
    assert json.loads(answer) == {"a": 1}


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(tiny_server, fields):
    # The ids of `"` and of `}`: what keeps a random model from going on for ever.
    [answer] = answers(tiny_server, logit_bias={"1": 8, "92": 16}, **fields)
    assert isinstance(json.loads(answer), dict)


@pytest.mark.parametrize("name", ["regex", "choice", "grammar"])
def test_regexes_choices_and_grammars_by_both_names(tiny_server, name):
    asked: Any = {"regex": "[ab]{5}!", "choice": ["yes", "no"], "grammar": 'root ::= "a" [bc] [bc]'}[name]
    [answer] = answers(tiny_server, structured_outputs={name: asked})
    assert answers(tiny_server, COMPLETIONS, **{f"guided_{name}": asked}) != []
    match name:
        case "regex":
            assert len(answer) == 6
            assert set(answer) <= set("ab!")
        case "choice":
            assert answer in asked
        case "grammar":
            assert answer in ("abb", "abc", "acb", "acc")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
    ],
)
def test_structural_tags(tiny_server, fields):
    status, reply = ask(tiny_server, **ONLY_TAGS, **fields)
    assert status == 200, reply
    assert reply["choices"][0]["message"]["content"] == "<n>7</n>"


def test_text_needs_no_grammar(tiny_server):
    plain = {"max_tokens": 8, "ignore_eos": True}
    _, free = ask(tiny_server, **plain)
    _, text = ask(tiny_server, response_format={"type": "text"}, structured_outputs={}, **plain)
    assert text["choices"] == free["choices"]


def test_each_choice_has_a_place_of_its_own(tiny_server):
    fields = {"n": 6, "structured_outputs": {"regex": "[ab]{3}[cd]*e"}, "logit_bias": {"68": 3}}
    several = answers(tiny_server, **fields)
    assert len(set(several)) > 1
    for answer in several:
        assert set(answer[:3]) <= set("ab")
        assert answer.endswith("e")
    assert answers(tiny_server, **{**fields, "n": 1}) == several[:1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams(tiny_server, path):
    prompt = (
        {"prompt": "Once"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Once"}]}
    )
    body = {**prompt, "seed": 1, "temperature": 1, "max_tokens": 80, "guided_json": SCHEMA, "n": 2}
    choices = streamed.joined(streamed.chunks(tiny_server.url, path, body))
    assert [choice["text"] for choice in choices] == answers(tiny_server, path, guided_json=SCHEMA, n=2)


def test_an_answer_that_is_cut_off_says_so(tiny_server):
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        status, reply = ask(tiny_server, guided_json=SCHEMA, **fields)
        assert status == 200
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["choices"][0]["message"]["content"] == '{"nam'


def test_a_complete_answer_ends_whatever_else_is_asked(tiny_server):
    for fields in ({"ignore_eos": True}, {"min_tokens": 40}, {"max_tokens": 3}):
        assert answers(tiny_server, guided_choice=["yes"], **fields) == ["yes"]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", "Unimplemented"),
        ({"guided_json": "{"}, "guided_json", "truncated"),
        ({"guided_json": "[]"}, "guided_json", "Expected `object`"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_choice": []}, "guided_choice", "length"),
        ({"guided_grammar": "root ::= )"}, "guided_grammar", "line 1"),
        ({"structured_outputs": {"json": {"type": "thing"}}}, "structured_outputs.json", "thing"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "cannot go"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs.regex", "cannot go"),
        ({"structured_outputs": {"structural_tag": 1}}, "structured_outputs.structural_tag", "got `int`"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structures"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": UNSUPPORTED}}, "response_format", "/a"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "cannot go"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_reason(tiny_server, fields, param, reason):
    status, reply = ask(tiny_server, **fields)
    assert (status, reply["error"]["param"]) == (400, param)
    assert reason in reply["error"]["message"]


def test_mixed_with_others_and_with_what_is_refused(tiny_server):
    """Whoever asks for nothing is answered as if alone, and so is everybody else."""
    asked: list[dict[str, Any]] = [
        {"guided_json": SCHEMA},
        {"ignore_eos": True, "max_tokens": 40},
        {"guided_regex": "("},
        {"guided_regex": "[a-f]{30}"},
        {"temperature": 0, "ignore_eos": True, "max_tokens": 40},
        {"guided_json": {"not": {}}},
        {"guided_choice": ["one", "two"]},
        {"guided_regex": "((((x+)+)+)+)+y", "max_tokens": 20},
    ]

    def outcome(fields: dict[str, Any]) -> Any:
        status, reply = ask(tiny_server, **fields)
        return status, reply.get("choices", reply.get("error"))

    alone = list(map(outcome, asked))
    assert [status for status, _ in alone] == [200, 200, 400, 200, 200, 400, 200, 200]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(outcome, asked * 2)) == alone * 2
