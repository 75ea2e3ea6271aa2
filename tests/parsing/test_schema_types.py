"""Text becomes the JSON of what a schema allows, and any schema will do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.parsing.schema_types import is_text, to_json

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "integer", "null", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(["type", "enum", "const", "anyOf", "oneOf", "$ref"]), _VALUES),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
    max_leaves=4,
)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), _VALUES | _SCHEMAS)
def test_there_is_json_for_any_text_and_schema(text, schema):
    value = json.loads(to_json(text, schema))
    if is_text(schema):
        assert value == text


@settings(deadline=None)
@given(_VALUES)
def test_json_is_itself_where_the_schema_says_nothing(value):
    if not isinstance(value, str):
        assert json.loads(to_json(json.dumps(value), None)) == value


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": ["string", "integer"]}, 5),
        ("five", {"type": ["string", "integer"]}, "five"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"enum": [1, 5]}, 5),
        ("5", {"enum": ["1", "5"]}, "5"),
        ("5", {"const": 5}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("TRUE", {"type": "boolean"}, True),
        ("NaN", {"type": "number"}, "NaN"),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        (" 5\n", {"type": "integer"}, 5),
        (r'"\ud83d"', None, r'"\ud83d"'),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ],
)
def test_the_schema_decides(text, schema, expected):
    assert json.loads(to_json(text, schema)) == expected
