"""Reads one choice of a chat, in the model's formats; every API's replies are made from its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.engine.stop_strings import StopStrings
from vllm_metal.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallEnd, ToolCallStart
from vllm_metal.parsing.output_parser import OutputParser


class AnswerReader:
    """`stops` end the answer where they are in its content; reasoning and calls may hold them.

    With `one_call` the answer ends behind its first call; without `tells_reasoning` that is left out.
    """

    def __init__(
        self, parser: OutputParser, stops: StopStrings, *, one_call: bool, tells_reasoning: bool
    ) -> None:
        self.enough = False
        #: The one that has ended the answer.
        self.stop_string: str | None = None
        self._parser = parser
        self._stops = stops
        self._one_call = one_call
        self._tells_reasoning = tells_reasoning
        self._called = False

    def read(self, output: RequestOutput) -> list[Event]:
        """What more of the answer has to be told. Once it is `enough`, nothing has."""
        events = self._parser.feed(output.text)
        if output.finished:
            events += self._parser.finish()
        told = list(self._told(events, last=output.finished))
        if output.finished and not self.enough:
            told += _content(self._stops.flush())
        self.stop_string = self._stops.met or output.stop_string
        return told

    def finish_reason(self, reason: FinishReason) -> str:
        """What OpenAI calls the end of an answer whose request ended for `reason`."""
        return "tool_calls" if self._called and reason is FinishReason.STOP else reason

    def _told(self, events: Iterable[Event], *, last: bool) -> Iterator[Event]:
        for event in events:
            if self.enough:
                return
            if isinstance(event, ContentDelta):
                yield from _content(self._stops.feed(event.text))
                self.enough = self._stops.stopped
                continue
            yield from _content(self._stops.flush())
            if isinstance(event, ReasoningDelta) and not self._tells_reasoning:
                continue
            yield event
            self._called = self._called or isinstance(event, ToolCallStart)
            # A call that the end has cut is not all that was wanted.
            self.enough = self._one_call and isinstance(event, ToolCallEnd) and (event.complete or not last)


def _content(text: str) -> list[Event]:
    return [ContentDelta(text)] if text else []
