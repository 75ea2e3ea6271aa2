"""Arguments that a format writes as plain text, converted by the types that the tool's schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_metal.parsing.notation import PYTHON, parse
from vllm_metal.parsing.source import Malformed

_TYPE_NAMES: dict[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number",
    str: "string", list: "array", dict: "object",
}  # fmt: skip


def is_text(schema: Any) -> bool:
    """Whether the value can only be a string, so that it need not be seen whole to be converted."""
    return set(_types(schema)) == {"string"}


def may_be_text(schema: Any) -> bool:
    """Whether the value can be a string, also where nothing is known of it."""
    types = set(_types(schema))
    return not types or "string" in types


def to_json(text: str, schema: Any) -> str:
    """JSON of the value that `text` means: what the schema allows, else what it looks like, else a string."""
    allowed = set(_types(schema))
    if "number" in allowed:
        allowed.add("integer")
    for reading in (_as_json, _as_python):
        try:
            value = reading(text.strip())
            if "integer" in allowed and isinstance(value, float) and value.is_integer():
                value = int(value)
            if not allowed or _TYPE_NAMES[type(value)] in allowed - {"string"}:
                written = json.dumps(value, ensure_ascii=False, allow_nan=False)
                written.encode()
                return written
        except (ValueError, RecursionError, Malformed):
            continue
    if "boolean" in allowed and text.strip().lower() in ("true", "false"):
        return text.strip().lower()
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> Any:
    return json.loads(text, strict=False)


def _as_python(text: str) -> Any:
    return parse(text, PYTHON)


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    if declared is not None:
        yield from map(str, declared if isinstance(declared, list) else [declared])
        return
    for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        yield _TYPE_NAMES[type(value)]
    for union in ("anyOf", "oneOf", "allOf"):
        for member in _list(schema.get(union)):
            yield from _types(member)


def _list(value: Any) -> list[Any]:
    """A schema is the client's, and may be none."""
    return value if isinstance(value, list) else []
