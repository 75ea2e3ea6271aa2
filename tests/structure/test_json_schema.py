"""Which objects get no other properties, and that all of a schema else is kept."""

from __future__ import annotations

import copy
import json

import pytest

from byte_vocabulary import compiled, compiler, encode
from vllm_metal.structure import json_schema
from vllm_metal.structure.grammar import Grammar

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"properties": {"b": True}}
SHUT = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, {**A, **SHUT}),
        ({"items": A}, {"items": {**A, **SHUT}}),
        ({"anyOf": [A, B, True]}, {"anyOf": [{**A, **SHUT}, {**B, **SHUT}, True]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": {**A, **SHUT}}}),
        ({"properties": {"properties": B}}, {"properties": {"properties": {**B, **SHUT}}, **SHUT}),
        ({"additionalProperties": A, **B}, {"additionalProperties": {**A, **SHUT}, **B}),
    ],
)
def test_objects_get_no_other_properties(schema, expected):
    asked = copy.deepcopy(schema)
    assert json_schema.bounded(schema, {}) == {**expected, "x-guidance": {}}
    assert schema == asked


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**B, "required": ["c"]},
        {"allOf": [A, B]},
        {"oneOf": [A, B]},
        {"anyOf": [A, B], "properties": {"c": True}},
        {"$ref": "#/$defs/A", **B, "$defs": {"A": A}},
        {**B, "patternProperties": {"^x": A}},
        {"items": A, "properties": {"x": {"not": A}}},
        {"enum": [A, B]},
        {"properties": 1, "items": None, "anyOf": {}, "$defs": []},
        {"properties": {}, "required": [["a"]]},
    ],
)
def test_what_may_be_wanted_otherwise_is_left_alone(schema):
    assert json_schema.bounded(schema, {}) == {**schema, "x-guidance": {}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**B, "required": ["c"]}, {**B, "required": ["c"], **SHUT}),
        ({"allOf": [A, B]}, {"allOf": [{**A, **SHUT}, {**B, **SHUT}]}),
        ({**B, "oneOf": [A]}, {**B, "oneOf": [{**A, **SHUT}], **SHUT}),
        ({**B, "patternProperties": {"^x": A}}, {**B, "patternProperties": {"^x": {**A, **SHUT}}, **SHUT}),
        ({"properties": {"properties": B}}, {"properties": {"properties": {**B, **SHUT}}, **SHUT}),
        ({"enum": [A, B]}, {"enum": [A, B]}),
    ],
)
def test_in_any_case(schema, expected):
    assert json_schema.bounded(schema, {}, in_any_case=True) == {**expected, "x-guidance": {}}


def test_depth_is_no_matter():
    schema: dict[str, object] = A
    for _ in range(100_000):
        schema = {"items": schema}
    closed = json_schema.bounded(schema)
    for _ in range(100_000):
        closed = closed["items"]
    assert closed == {**A, **SHUT}


def test_tags_are_bounded_too():
    tags = {"structures": [{"begin": "<", "schema": A, "end": ">"}], "triggers": ["<"]}
    grammar = compiled(Grammar("structural_tag", json.dumps(tags)), compiler())
    for answer, may_follow in (('<{"a": 1}>', True), ('<{"a":  1}>', False), ('<{"a": 1, "b"', False)):
        matcher = grammar.matcher()
        assert (matcher.inner.validate_tokens(encode(answer)) == len(answer)) is may_follow, answer
