"""Lark grammars of what a model writes round its content: the reasoning before it, and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_metal.parsing import schema_types
from vllm_metal.parsing.notation import JSON
from vllm_metal.parsing.reasoning_format import ReasoningFormat
from vllm_metal.parsing.tool_format import Pattern, ToolFormat
from vllm_metal.structure import json_schema

#: Lark for exactly a text, special tokens as such.
Literal = Callable[[str], str]
Tool = Mapping[str, Any]

_MOST_CALLS = 16
_MOST_REFERENCES = 8
_WHITESPACE = r"ws: /[ \n]{1,6}/"
_TOKEN = re.compile(r"<\[\d+\]>")
_FIELDS = {"id": "/[a-zA-Z0-9]{9,10}/", "number": "/[0-9]{1,3}/", "channel": '"commentary"'}
_SPELLED_AS_TOKEN = re.compile(r"\[/?[A-Z_]+\]")


def reasoning_first(
    reasoning: ReasoningFormat,
    literal: Literal,
    *,
    begun: bool,
    before_content: bool,
    max_tokens: int | None = None,
) -> str:
    """Lark for reasoning, to be gone on with by the name of what follows it.

    `begun` says that the prompt has opened the reasoning, `before_content` that content must follow. A limit
    of `max_tokens` is for marks that are `tokens`.
    """
    rules = _Rules(literal, max_tokens)
    rest = _joined(rules.until(reasoning.end), "ws?", literal(reasoning.resume))
    thought = rules.add(_joined(literal(reasoning.begin), rest))
    more = f"{thought}*" if reasoning.resume else "" if begun else f"{thought}?"
    start = _joined(rest if begun else "", more, "rest")
    follows = literal(reasoning.content_begin) if before_content else ""
    return "\n".join([start, *rules.lines, f"rest: {follows}"])


def tokens(reasoning: ReasoningFormat, literal: Literal) -> tuple[str, str] | None:
    """The marks of reasoning in Lark, if each is a special token."""
    marks = literal(reasoning.begin), literal(reasoning.end)
    return marks if all(map(is_token, marks)) else None


def is_token(lark: str) -> bool:
    """Whether it stands for one special token."""
    return _TOKEN.fullmatch(lark) is not None


def anything_but(token: str) -> str:
    """Lark for any answer that does not begin with `token`."""
    return f"start: (<[^{token[2:]} (<[*]>)*)?"


def calls_in_text(calls: str, begin: str) -> str:
    """Lark for any answer in which the token `begin` only ever begins `calls`."""
    other = f"(<[^{begin[2:]})*"
    return f"start: {other} (calls {other})*\n{calls.replace('start:', 'calls:', 1)}"


def calls_or_content(calls: str, schema: str, reasoning: ReasoningFormat | None, literal: Literal) -> str:
    """Lark for `calls`, or else content that is JSON of this schema."""
    begin = literal(reasoning.content_begin) if reasoning else ""
    return f"start: calls | {_joined(begin, f'%json {schema}')}\n{calls.replace('start:', 'calls:', 1)}"


def calls(tool_format: ToolFormat, tools: Sequence[Tool], literal: Literal, *, several: bool) -> str | None:
    """Lark for calls of `tools`, as OpenAI's API has them; None for a format that is only read."""
    rules = _Rules(literal)
    several = several and tool_format.several
    kinds = []
    for pattern in tool_format.calls:
        written = [_call(rules, tool_format, pattern, tool["function"]) for tool in tools]
        if None in written:
            continue
        call = rules.add(" | ".join(filter(None, written)))
        if tool_format.in_list and pattern.pieces[0][1] == "object":
            more = f' ("," ws? {call}){{0,{_MOST_CALLS - 1}}}' if several else ""
            kinds.append(f'"[" ws? {call}{more} ws? "]"')
        else:
            kinds.append(f"{call} (ws? {call}){{0,{_MOST_CALLS - 1}}}" if several else call)
    if not kinds:
        return None
    begin, end = ("", "") if tool_format.unmarked else (tool_format.begin, tool_format.end)
    opening, closing = (
        (literal(begin), "ws?") if begin else ("", ""),
        ("ws?", literal(end)) if end else ("", ""),
    )
    section = rules.add(" | ".join(_joined(*opening, kind, *closing) for kind in kinds))
    more = f" (ws? {section}){{0,{_MOST_CALLS - 1}}}" if several and begin else ""
    return "\n".join([f"start: {section}{more}", *rules.lines])


class _Rules:
    """Collects rules and names them."""

    def __init__(self, literal: Literal, max_text_tokens: int | None = None) -> None:
        self.literal = literal
        options = "" if max_text_tokens is None else f"[max_tokens={max_text_tokens}]"
        self.lines = [_WHITESPACE, rf"text{options}: /(.|\n)*/"]
        self._until: dict[str, str] = {}

    def add(self, expression: str, *, options: str = "") -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {expression}")
        return name

    def until(self, closing: str) -> str:
        """Text up to `closing`, and that."""
        if closing not in self._until:
            marked = self.literal(closing.strip())
            # Text ends by itself at a special token.
            self._until[closing] = (
                f"text {marked}"
                if marked.startswith("<[")
                else self.add(rf"/(.|\n)*/ {self.literal(closing)}", options="[lazy]")
            )
        return self._until[closing]

    def marks(self, text: str, *, within_line: bool = False) -> str:
        """The literal text of a `Pattern`."""
        parts = {" ": '" "?' if within_line else "ws?", "\n": r'"\n"?'}
        return " ".join(parts.get(part) or self.literal(part) for part in re.split(r"([ \n])", text))


def _call(
    rules: _Rules, tool_format: ToolFormat, pattern: Pattern, function: Mapping[str, Any]
) -> str | None:
    """None for a pattern that is only read."""
    schema = function["parameters"]
    written = []
    if any(not rules.literal(mark).startswith("<[") for mark in _SPELLED_AS_TOKEN.findall(pattern.text)):
        return None  # This vocabulary is that of another version of the model.
    previous = ""
    for before, field, _ in pattern.pieces:
        # What has no quotes round it is read within its line.
        written.append(rules.marks(before, within_line=previous in _FIELDS))
        previous = field
        match field:
            case "name":
                written.append(rules.literal(function["name"]))
            case "object":
                written.append(_call(rules, tool_format, tool_format.object, function) or "")
            case "arguments" if tool_format.notation is JSON:
                written.append(_json(schema))
            case "parameters" if "{type}" not in tool_format.parameter.text:
                written.append(_parameters(rules, tool_format.parameter, schema))
            case _ if field in _FIELDS:
                written.append(_FIELDS[field])
            case _:
                return None
    if tool_format.several or pattern is tool_format.object:  # Else the model's end token stands there.
        written.append(rules.marks(pattern.tail))
    return _joined(*written)


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(json_schema.bounded(dict(schema)))}"


def _parameters(rules: _Rules, parameter: Pattern, schema: Mapping[str, Any]) -> str:
    """One after another, those that may be left out behind the others."""
    properties, needed = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):  # A schema is the client's, and may be none.
        return ""
    required = [name for name in properties if isinstance(needed, list) and name in needed]
    optional = [name for name in properties if name not in required]

    def written(name: str) -> str:
        return rules.add(_parameter(rules, parameter, name, _within(schema, properties[name])))

    return " ".join(
        [f"{written(name)} ws?" for name in required] + [f"({written(name)} ws?)?" for name in optional]
    )


def _within(schema: Mapping[str, Any], declared: Any) -> Mapping[str, Any]:
    """A part of a schema, with what it refers to."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    # References may go round in circles.
    for _ in range(_MOST_REFERENCES):
        if not (isinstance(declared, Mapping) and str(declared.get("$ref", "")).startswith("#/")):
            break
        found: Any = schema
        for key in declared["$ref"].split("/")[1:]:
            found = found.get(key) if isinstance(found, Mapping) else None
        declared = found
    return {**definitions, **declared} if isinstance(declared, Mapping) else {}


def _parameter(rules: _Rules, parameter: Pattern, name: str, schema: Mapping[str, Any]) -> str:
    written = []
    is_string = schema_types.may_be_text(schema)
    for before, field, after in parameter.pieces:
        written.append(rules.marks(before))
        match field:
            case "key":
                written.append(rules.literal(name))
            case "string":
                written.append(json.dumps(json.dumps(is_string)))
            case "value" if not is_string:
                written += [_json(schema), rules.marks(after)]
            case "value" if options := _options(schema):
                written += ["(" + " | ".join(map(rules.literal, options)) + ")", rules.marks(after)]
            case "value":
                written.append(rules.until(after))
    return _joined(*written)


def _options(schema: Mapping[str, Any]) -> list[str]:
    """The strings that an enumeration allows."""
    options = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return [option for option in options if isinstance(option, str)]
