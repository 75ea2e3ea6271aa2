"""A whole answer, put together from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_metal.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass
class ParsedCall:
    """`arguments` is JSON text, whole only if `complete`."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Answer:
        answer = cls()
        for event in events:
            match event:
                case ContentDelta(text):
                    answer.content += text
                case ReasoningDelta(text):
                    answer.reasoning += text
                case ToolCallStart(_, id, name):
                    answer.tool_calls.append(ParsedCall(id, name))
                case ToolCallArguments(index, text):
                    answer.tool_calls[index].arguments += text
                case ToolCallEnd(index, complete):
                    answer.tool_calls[index].complete = complete
        return answer
