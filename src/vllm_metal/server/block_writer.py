"""Puts an answer as Anthropic's blocks of content, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from vllm_metal.api.message_replies import (
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageEvent,
    SignatureDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from vllm_metal.api.message_turns import call_id
from vllm_metal.api.sealed_text import seal
from vllm_metal.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

# Some clients forget reasoning that nobody has signed.
_SIGNATURE = "unsigned"


class BlockWriter:
    """Without `shows_thinking` reasoning is in its signature, which clients keep and bring back."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._block: type[Content] | None = None
        self._hidden = ""

    def write(self, events: Iterable[Event]) -> Iterator[MessageEvent]:
        for event in events:
            match event:
                case ContentDelta(text):
                    yield from self._in(TextContent())
                    yield ContentBlockDelta(self._index, TextDelta(text))
                case ReasoningDelta(text):
                    yield from self._in(ThinkingContent())
                    if self._shows_thinking:
                        yield ContentBlockDelta(self._index, ThinkingDelta(text))
                    else:
                        self._hidden += text
                case ToolCallStart(_, id, name):
                    yield from self.end()
                    yield from self._in(ToolUseContent(call_id(id), name))
                case ToolCallArguments(_, text):
                    yield ContentBlockDelta(self._index, InputJsonDelta(text))
                case ToolCallEnd():
                    yield from self.end()

    def end(self) -> Iterator[MessageEvent]:
        """End the block that has begun, if any."""
        if self._block is None:
            return
        if self._block is ThinkingContent:
            signature = _SIGNATURE if self._shows_thinking else seal(self._hidden)
            self._hidden = ""
            yield ContentBlockDelta(self._index, SignatureDelta(signature))
        yield ContentBlockStop(self._index)
        self._block = None

    def _in(self, block: Content) -> Iterator[MessageEvent]:
        """Begin `block`, unless one of its kind has begun."""
        if self._block is type(block):
            return
        yield from self.end()
        self._index += 1
        self._block = type(block)
        yield ContentBlockStart(self._index, block)


def joined(events: Iterable[MessageEvent]) -> list[Content]:
    """The blocks that a writer's events tell of."""
    blocks: list[Content] = []
    pieces: list[str] = []
    for event in events:
        match event:
            case ContentBlockStart(_, block):
                blocks.append(block)
                pieces = []
            case ContentBlockDelta(_, TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text)):
                pieces.append(text)
            case ContentBlockDelta(_, SignatureDelta(signature)):
                assert isinstance(blocks[-1], ThinkingContent)
                blocks[-1].signature = signature
            case ContentBlockStop():
                match blocks[-1], "".join(pieces):
                    case TextContent() as block, text:
                        block.text = text
                    case ThinkingContent() as block, text:
                        block.thinking = text
                    case ToolUseContent() as block, arguments:
                        block.input = _object(arguments)
    return blocks


def _object(arguments: str) -> dict[str, Any]:
    """Empty for arguments that are none: the answer was cut, or the model has written something else."""
    with suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(arguments, type=dict[str, Any])
    return {}
