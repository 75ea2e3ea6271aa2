"""Anthropic's messages: a whole reply, and the events of one that is streamed."""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, Struct

from vllm_metal.api.usage import Usage


class ThinkingTokens(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """All that a prompt has is in `input_tokens`, but for what was kept from earlier prompts."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    server_tool_use: None = None
    service_tier: None = None
    inference_geo: None = None

    @classmethod
    def of(cls, usage: Usage) -> Self:
        cached_tokens, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
        return cls(
            usage.prompt_tokens - cached_tokens,
            cached_tokens,
            usage.completion_tokens,
            None if details is UNSET else ThinkingTokens(details.reasoning_tokens),
        )


class TextContent(Struct, tag_field="type", tag="text"):
    text: str = ""
    citations: None = None


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class DirectCaller(Struct, tag_field="type", tag="direct"):
    """The model itself, not code that it wrote."""


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = msgspec.field(default_factory=dict)
    caller: DirectCaller = msgspec.field(default_factory=DirectCaller)


Content = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Content]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    stop_details: None = None
    container: None = None


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: Message


class Ping(Struct, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Content


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


MessageEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
