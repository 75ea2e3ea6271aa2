"""JSON Schemas, as answers are held to them."""

from __future__ import annotations

from typing import Any

#: Whitespace as models like it, but not without end, which is valid too and what weak ones like best.
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

#: Members that hold schemas by name, and those that hold one or a list of them.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_PLAIN = frozenset(
    {"items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "allOf", "oneOf"}
)
#: Where several schemas speak of one value, each must let the properties of the others pass.
_COMBINING = frozenset(
    {"allOf", "oneOf", "not", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties"}
)
_APPLYING = frozenset({"properties", "anyOf", "$ref"})


def bounded(
    schema: dict[str, Any], options: dict[str, Any] = OPTIONS, *, in_any_case: bool = False
) -> dict[str, Any]:
    """As the library takes it, with bounds to what weak models write without end: whitespace, by `options`,
    and properties that the schema does not name, `in_any_case` even those that it may have meant to allow.
    What follows it follows `schema` too.
    """
    return {**_closed(schema, in_any_case), "x-guidance": options}


def _closed(schema: dict[str, Any], in_any_case: bool) -> dict[str, Any]:
    copy = {**schema}
    objects = []
    unseen = [copy]
    while unseen:
        each = unseen.pop()
        if not in_any_case and (_COMBINING & each.keys() or len(_APPLYING & each.keys()) > 1):
            return schema
        if _is_open(each) and (in_any_case or _names_required(each)):
            objects.append(each)
        unseen += _copied_parts(each)
    for each in objects:
        each["additionalProperties"] = False
    return copy


def _is_open(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema


def _names_required(schema: dict[str, Any]) -> bool:
    required = schema.get("required", [])
    return isinstance(required, list) and all(
        isinstance(name, str) and name in schema["properties"] for name in required
    )


def _copied_parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas within, which are copies from then on."""
    parts = []

    def copied(part: Any) -> Any:
        if isinstance(part, dict):
            part = {**part}
            parts.append(part)
        return part

    for key in _NAMED & schema.keys():
        if isinstance(schema[key], dict):
            schema[key] = {name: copied(part) for name, part in schema[key].items()}
    for key in _PLAIN & schema.keys():
        part = schema[key]
        schema[key] = list(map(copied, part)) if isinstance(part, list) else copied(part)
    return parts
