"""JSON Schemas, as answers are held to them."""

from __future__ import annotations

from typing import Any

#: Whitespace as models like it, but not without end, which is valid too and what weak ones like best.
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

#: Members that hold schemas by name, and those that hold one or a list of them.
_NAMED = frozenset({"properties", "$defs", "definitions"})
_PLAIN = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties", "anyOf"})
#: Where several schemas speak of one value, each must let the properties of the others pass.
_COMBINING = frozenset(
    {"allOf", "oneOf", "not", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties"}
)
_APPLYING = frozenset({"properties", "anyOf", "$ref"})


def bounded(schema: dict[str, Any], options: dict[str, Any] = OPTIONS) -> dict[str, Any]:
    """As the library takes it, with bounds to what weak models write without end: whitespace, by `options`,
    and properties that the schema does not name. What follows it follows `schema` too.
    """
    return {**_closed(schema), "x-guidance": options}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    copy = {**schema}
    objects = []
    unseen = [copy]
    while unseen:
        each = unseen.pop()
        if _COMBINING & each.keys() or len(_APPLYING & each.keys()) > 1:
            return schema
        if _may_be_closed(each):
            objects.append(each)
        unseen += _copied_parts(each)
    for each in objects:
        each["additionalProperties"] = False
    return copy


def _may_be_closed(schema: dict[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or "additionalProperties" in schema:
        return False
    return isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required
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
