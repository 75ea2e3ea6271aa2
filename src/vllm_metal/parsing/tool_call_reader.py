"""Reads tool calls, by the patterns of a `ToolFormat`, while their text arrives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_metal.parsing import notation, schema_types
from vllm_metal.parsing.events import Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from vllm_metal.parsing.marks import first_mark
from vllm_metal.parsing.source import Malformed, Source, Steps
from vllm_metal.parsing.tool_format import Pattern, ToolFormat

_NAME_KEYS = frozenset({"name", "tool_name", "function"})
_ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "index", "tool_call_id", "type"})

EmitEvent = Callable[[Event], None]


class ToolCallReader:
    """`tools` are the request's, as OpenAI's API has them."""

    def __init__(
        self, source: Source, tool_format: ToolFormat, tools: Iterable[Mapping[str, Any]], emit: EmitEvent
    ) -> None:
        functions = [tool["function"] for tool in tools if "function" in tool]
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self._source = source
        self.tool_format = tool_format
        self._emit = emit
        self._num_calls = 0

    def read(self, *, known_only: bool = False) -> Steps[bool]:
        """Read the calls that begin here; false, with nothing read, where there are none.

        With `known_only` what calls none of the request's tools is no call.
        """
        source, begin = self._source, self._source.position
        source.keep = True
        if self.tool_format.begin:
            yield from source.accept(self.tool_format.begin)
        yield from source.whitespace()
        in_list = yield from source.accept("[")
        called = False
        end = begin
        while (yield from self._call(known_only)):
            called, end = True, source.position
            source.keep = True
            yield from source.whitespace()
            yield from source.accept(",", ";")
            yield from source.whitespace()
        source.position = end
        if called:
            if in_list:
                yield from self._accept("]")
            if self.tool_format.end:
                yield from self._accept(self.tool_format.end)
        source.keep = False
        return called

    def _accept(self, mark: str) -> Steps[None]:
        """Read what closes the calls, if it is there."""
        begin = self._source.position
        yield from self._source.whitespace()
        if not (yield from self._source.accept(mark)):
            self._source.position = begin

    def _call(self, known_only: bool) -> Steps[bool]:
        yield from self._source.whitespace()
        begin = self._source.position
        for pattern in self.tool_format.calls:
            call = _Call(self._num_calls, self._emit, self._schemas.keys() if known_only else None)
            try:
                yield from self._follow(pattern, call)
            except Malformed:
                if not call.started:
                    self._source.position = begin
                    continue
                yield from self._rest(pattern, call)
            self._num_calls += 1
            return True
        return False

    def _rest(self, pattern: Pattern, call: _Call) -> Steps[None]:
        """What follows where the pattern was broken: shown as it is, for the client to judge."""
        if call.ended:
            return
        closing = first_mark(pattern.tail)
        marks = {closing, self.tool_format.end, *self.tool_format.openings} - {""}
        if (yield from self._source.stream_until(sorted(marks), call.add, trim=True)) == closing:
            yield from self._accept(closing)
        call.end(complete=False)

    def _follow(self, pattern: Pattern, call: _Call) -> Steps[None]:
        source = self._source
        fields: dict[str, str] = {}
        for before, field, after in pattern.pieces:
            yield from source.expect(before)
            match field:
                case "object":
                    yield from self._object(call)
                case "arguments":
                    if (yield from source.char()) != "{":
                        raise Malformed("an object")
                    self._start(call, fields)
                    yield from notation.transcribe(source, self.tool_format.notation, call.add)
                    call.end(complete=True)
                case "keywords":
                    yield from self._keywords(call, fields)
                case "parameters":
                    yield from self._parameters(call, fields, first_mark(after))
                case "name" | "id" | "number":
                    fields[field] = yield from source.word()
                case _:
                    fields[field] = yield from source.field(first_mark(after))
        if call.ended:
            yield from self._accept_tail(pattern.tail)
        else:
            yield from source.expect(pattern.tail)
            call.add("}")
            call.end(complete=True)

    def _accept_tail(self, tail: str) -> Steps[None]:
        """Read what closes a call, if it is there: it may be the token that ended the answer."""
        begin = self._source.position
        self._source.keep = True
        try:
            yield from self._source.expect(tail)
        except Malformed:
            self._source.position = begin

    def _start(self, call: _Call, fields: Mapping[str, str]) -> None:
        call.start(fields["name"], self.tool_format.call_id(fields))
        self._source.keep = False

    def _object(self, call: _Call) -> Steps[None]:
        """JSON with name and arguments, in either order."""
        source = self._source
        yield from source.expect("{")
        while True:
            yield from source.whitespace()
            key = yield from self._string()
            yield from source.expect(" : ")
            if key in _NAME_KEYS and not call.started:
                self._start(call, {"name": (yield from self._string())})
            elif key in _ARGUMENTS_KEYS and not call.arguments_read:
                yield from self._arguments(call)
            elif key in _OTHER_KEYS or call.started:
                yield from notation.transcribe(source, notation.JSON, lambda _: None)
            else:
                raise Malformed("a key of a call")
            yield from source.whitespace()
            mark = yield from source.accept(",", "}")
            if mark != ",":
                break
        if not mark or not call.started:
            raise Malformed("}")
        while (yield from source.accept("}")):
            pass  # Small models often write a brace too many.
        if not call.arguments_read:
            call.add("{}")
            call.end(complete=True)

    def _arguments(self, call: _Call) -> Steps[None]:
        """What an object has for arguments: an object, its JSON in a string, or null for none."""
        source = self._source
        opening = yield from source.char()
        if opening == "{":
            yield from notation.transcribe(source, notation.JSON, call.add)
        elif opening == '"':
            text = (yield from self._string()).strip() or "{}"
            if not isinstance(notation.parse(text, notation.JSON), dict):
                raise Malformed("an object")
            call.add(text)
        elif (yield from source.accept("null")):
            call.add("{}")
        else:
            raise Malformed("an object")
        call.end(complete=True)

    def _string(self) -> Steps[str]:
        text = yield from notation.read(self._source, notation.JSON)
        if not isinstance(text, str):
            raise Malformed("a string")
        # Half a surrogate pair can be spelt but not sent.
        return text.encode(errors="replace").decode()

    def _keywords(self, call: _Call, fields: Mapping[str, str]) -> Steps[None]:
        source, separator = self._source, "{"
        self._start(call, fields)
        yield from source.whitespace()
        while (yield from source.char()) != ")":
            key = yield from source.word()
            yield from source.expect(" = ")
            call.add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from notation.transcribe(source, notation.PYTHON, call.add)
            yield from source.whitespace()
            if not (yield from source.accept(",")):
                break
            yield from source.whitespace()
            separator = ", "
        if not call.arguments_read:
            call.add("{")

    def _parameters(self, call: _Call, fields: Mapping[str, str], closing: str) -> Steps[None]:
        """One after another; what must follow the name tells a call from text that only looks like one."""
        source, separator = self._source, "{"
        parameter = self.tool_format.parameter
        yield from source.whitespace()
        mark = yield from source.accept(parameter.prefix, closing)
        if not mark:
            raise Malformed(closing)
        self._start(call, fields)
        while mark == parameter.prefix:
            source.position -= len(mark)
            yield from self._parameter(call, self._schemas.get(fields["name"]), separator)
            separator = ", "
            yield from source.whitespace()
            mark = yield from source.accept(parameter.prefix, closing)
        if mark:
            source.position -= len(mark)
        if not call.arguments_read:
            call.add("{")

    def _parameter(self, call: _Call, schema: Any, separator: str) -> Steps[None]:
        source = self._source
        fields: dict[str, str] = {}
        for before, field, after in self.tool_format.parameter.pieces:
            yield from source.expect(before)
            if field != "value":
                fields[field] = yield from source.field(first_mark(after))
                continue
            call.add(f"{separator}{json.dumps(fields['key'], ensure_ascii=False)}: ")
            closings = (after, after.lstrip("\n"))
            yield from self._value(call, _value_schema(fields, schema), closings)

    def _value(self, call: _Call, schema: Any, closings: tuple[str, ...]) -> Steps[None]:
        """Text up to one of `closings`: a string is passed on as it comes, the rest once it is whole."""
        source, quotes = self._source, self.tool_format.text_quotes
        if quotes and (yield from source.accept(quotes[0])):
            schema, closings = {"type": "string"}, tuple(quotes[1] + closing for closing in closings)
        if schema_types.is_text(schema):
            call.add('"')
            closing = yield from source.stream_until(closings, lambda text: call.add(notation.escape(text)))
            call.add('"' if closing else "")
        else:
            pieces: list[str] = []
            closing = yield from source.stream_until(closings, pieces.append)
            text = "".join(pieces)
            call.add(schema_types.to_json(text, schema) if closing else text)
        if not closing:
            raise Malformed(closings[-1])
        source.position += len(closing)


def _value_schema(fields: Mapping[str, str], schema: Any) -> Any:
    """The schema of a parameter's value: the tool's, unless the call says what it is."""
    if "string" in fields:
        return {"type": "string"} if fields["string"] == "true" else None
    if "type" in fields:
        return {"type": fields["type"]}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(fields["key"]) if isinstance(properties, Mapping) else None


class _Call:
    """Says nothing before the name is known: until then the text may yet turn out to be no call."""

    def __init__(self, index: int, emit: EmitEvent, known: Iterable[str] | None) -> None:
        self.started = False
        self.arguments_read = False
        self.ended = False
        self._index = index
        self._emit = emit
        self._known = known
        self._held: list[Event] = []

    def start(self, name: str, call_id: str) -> None:
        """Raises Malformed for a name that cannot be one."""
        if not name or not name.isprintable() or (self._known is not None and name not in self._known):
            raise Malformed("the name of a tool")
        self.started = True
        self._emit(ToolCallStart(self._index, call_id, name))
        for event in self._held:
            self._emit(event)

    def add(self, arguments: str) -> None:
        if arguments:
            self.arguments_read = True
            self._say(ToolCallArguments(self._index, arguments))

    def end(self, *, complete: bool) -> None:
        self.ended = True
        self._say(ToolCallEnd(self._index, complete))

    def _say(self, event: Event) -> None:
        if self.started:
            self._emit(event)
        else:
            self._held.append(event)
