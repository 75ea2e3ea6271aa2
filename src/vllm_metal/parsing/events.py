"""What an `OutputParser` says of an answer; every API's replies are made from these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Comes once a call, before its arguments; `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON object that holds the arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """`complete` is false where the answer was cut, or its arguments are not what the format asks for."""

    index: int
    complete: bool


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


def append(events: list[Event], event: Event) -> None:
    """Add an event; text of the kind that came last joins it."""
    match events[-1] if events else None, event:
        case ContentDelta(before), ContentDelta(text):
            events[-1] = ContentDelta(before + text)
        case ReasoningDelta(before), ReasoningDelta(text):
            events[-1] = ReasoningDelta(before + text)
        case ToolCallArguments(index, before), ToolCallArguments(_, text):
            events[-1] = ToolCallArguments(index, before + text)
        case _:
            events.append(event)
