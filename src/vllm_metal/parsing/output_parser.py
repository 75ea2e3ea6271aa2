"""Tells what a model wrote apart, while it writes: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_metal.parsing.events import ContentDelta, Event, ReasoningDelta, append
from vllm_metal.parsing.reasoning_format import ReasoningFormat
from vllm_metal.parsing.source import Source, Steps
from vllm_metal.parsing.tool_call_reader import ToolCallReader
from vllm_metal.parsing.tool_format import ToolFormat


class OutputParser:
    """For one answer. How its text is cut into `feed`s makes no difference to what is said of it in all.

    Text that is no valid call is content. Whitespace next to a mark belongs to the mark. `tools` are the
    request's; `in_reasoning` says that the prompt has begun the reasoning.
    """

    def __init__(
        self,
        *,
        reasoning_format: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        in_reasoning: bool = False,
    ) -> None:
        self._source = Source()
        self._events: list[Event] = []
        self._reasoning = reasoning_format
        self._calls = (
            ToolCallReader(self._source, tool_format, tools, self._emit) if tool_format is not None else None
        )
        self._in_reasoning = False
        self._parsing = self._parse(in_reasoning and reasoning_format is not None)

    def feed(self, text: str) -> list[Event]:
        """What is certain once `text` has come; only what may be the beginning of a mark is held back."""
        self._source.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """What is left to say, once no more text will come."""
        self._source.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._parsing, None)
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        append(self._events, event)

    def _emit_text(self, text: str) -> None:
        if text:
            self._emit(ReasoningDelta(text) if self._in_reasoning else ContentDelta(text))

    def _parse(self, in_reasoning: bool) -> Steps[None]:
        source = self._source
        # A model may repeat the mark of reasoning that the template has written for it.
        begun = yield from self._begin()
        if in_reasoning:
            self._in_reasoning = True
        elif not begun:
            source.position = 0  # Whitespace that no mark follows is the answer's own.
        while True:
            marks = self._marks()
            mark = yield from source.stream_until(marks, self._emit_text, trim=bool(marks))
            if mark is None:
                return
            if (yield from self._read_mark(mark)):
                yield from self._begin()

    def _marks(self) -> tuple[str, ...]:
        """What is looked for in the midst of text."""
        openings = self._calls.tool_format.openings if self._calls else ()
        if self._reasoning is None:
            return openings
        return openings + ((self._reasoning.end,) if self._in_reasoning else self._reasoning.silent)

    def _read_mark(self, mark: str) -> Steps[bool]:
        """Read the mark, and the calls if it opens any; false if it turned out to be mere text."""
        source, reasoning = self._source, self._reasoning
        space = yield from source.whitespace()
        if reasoning and self._in_reasoning and mark == reasoning.end:
            source.position += len(mark)
            self._in_reasoning = False
            return True
        if self._calls and mark in self._calls.tool_format.openings and (yield from self._read_calls()):
            return True
        source.position += len(mark)
        if reasoning and mark in reasoning.silent:
            return True
        self._emit_text(space + mark)
        return False

    def _begin(self) -> Steps[bool]:
        """Read what may stand only where text begins: the mark of reasoning, and calls that have no mark."""
        begun = False
        yield from self._source.whitespace()
        while (yield from self._read_beginning()):
            begun = True
            yield from self._source.whitespace()
        return begun

    def _read_beginning(self) -> Steps[bool]:
        if self._in_reasoning:
            return False
        if self._reasoning and (yield from self._source.accept(self._reasoning.begin)):
            self._in_reasoning = True
            return True
        return bool(self._calls and self._calls.tool_format.unmarked and (yield from self._read_calls()))

    def _read_calls(self) -> Steps[bool]:
        """Where text can easily look like a call, only the name of a tool makes it one."""
        assert self._calls is not None
        known_only = self._in_reasoning or self._calls.tool_format.unmarked
        return (yield from self._calls.read(known_only=known_only))
