"""From the bytes of a body to a request type, with errors that name the field."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from vllm_metal.api.request_body import RequestBody
from vllm_metal.errors import InvalidRequest

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=RequestBody)
QueryT = TypeVar("QueryT", bound=Struct)

# "Expected `str`, got `int` - at `$.messages[0].content`"
_PROBLEM_AT_PATH = re.compile(r"(?P<problem>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")
_BROKEN_BOUND = re.compile(r"Expected `(?:int|float)` (<=|>=|>) (\S+)")
_COMPARISONS = {"<=": "at most", ">=": "at least", ">": "above"}
_INVALID_VALUE = re.compile("Invalid (enum )?value")
_LARGEST_EXACT = 2**53
#: Each costs the event loop up to a microsecond, before anything can be said of the fields.
_MAX_PARTS = 1 << 20
# A string that does not end is one too, or each quotation mark in it would begin a search.
_PART = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode(body: bytes, request_type: type[RequestT]) -> RequestT:
    """Raises InvalidRequest for a body that is no JSON object, or of too many parts, or a field that is wrong
    or unsupported.
    """
    _check_parts(body)
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        fields = {name: _whole(value) for name, value in fields.items() if value is not None}
        _refuse_unsupported(fields, request_type)
        request = msgspec.convert(fields, request_type)
    except msgspec.ValidationError as exc:
        raise _invalid_field(str(exc)) from None
    except msgspec.DecodeError as exc:
        hint = "escapes like `\\ud83d` are valid in pairs only" if _ESCAPED_SURROGATE.search(body) else None
        raise InvalidRequest(f"the body is not valid JSON: {exc}", hint=hint) from None
    _log_ignored(fields, request_type)
    return request


def decode_query(query: Mapping[str, str], query_type: type[QueryT]) -> QueryT:
    """Raises InvalidRequest for a parameter that is wrong."""
    try:
        return msgspec.convert(dict(query), query_type, strict=False)
    except msgspec.ValidationError as exc:
        raise _invalid_field(str(exc)) from None


def _check_parts(body: bytes) -> None:
    if body.count(b'"') // 2 + body.count(b"[") + body.count(b"{") <= _MAX_PARTS:
        return
    # Texts may hold any number of these.
    if next(islice(_PART.finditer(body), _MAX_PARTS, None), None) is not None:
        raise InvalidRequest(f"the body holds more than {_MAX_PARTS} strings, lists and objects")


def _whole(value: object) -> object:
    # To JSON 2.0 and 2 are the same number. Larger ones a float does not hold exactly.
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
        return int(value)
    return value


def _refuse_unsupported(fields: dict[str, Any], request_type: type[RequestBody]) -> None:
    for name, neutral_values in request_type.unsupported.items():
        if name in fields and not any(_same(fields[name], neutral) for neutral in neutral_values):
            if successor := request_type.successors.get(name):
                raise InvalidRequest(f"`{name}` is not supported; `{successor}` has replaced it", param=name)
            raise InvalidRequest(f"`{name}` is not supported yet", param=name)


def _same(value: object, neutral: object) -> bool:
    # Python's True equals 1; JSON's true does not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _invalid_field(error: str) -> InvalidRequest:
    match = _PROBLEM_AT_PATH.fullmatch(error)
    assert match is not None
    problem, path = match["problem"], (match["path"] or "").partition("[...]")[0]
    if missing := _MISSING_FIELD.fullmatch(problem):
        param = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"`{param}` is required", param=param)
    param = path.lstrip(".")
    if broken := _BROKEN_BOUND.fullmatch(problem):
        bound = broken[2].removesuffix(".0")
        return InvalidRequest(f"`{param}` must be {_COMPARISONS[broken[1]]} {bound}", param=param)
    where = f"`{param}`" if param else "the body"
    return InvalidRequest(
        f"{where}: {problem[:1].lower()}{problem[1:]}",
        param=param or None,
        hint="`/openapi.json` lists the valid ones" if _INVALID_VALUE.match(problem) else None,
    )


def _log_ignored(fields: dict[str, Any], request_type: type[RequestBody]) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        known = {*request_type.__struct_fields__, *request_type.unsupported, *request_type.without_effect}
        if ignored := fields.keys() - known:
            logger.debug("ignored fields nobody knows: %r", sorted(ignored))
