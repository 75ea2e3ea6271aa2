"""Anthropic's messages: requests for one, and for the number of tokens that it would read."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from vllm_metal.api.generation import Positive
from vllm_metal.api.message_content import Block, SystemText, TextBlock
from vllm_metal.api.message_tools import AnyOrNoTool, MessageToolChoice, ToolDefinition
from vllm_metal.api.ranges import RANGES
from vllm_metal.api.request_body import RequestBody

StopSequences = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16)]


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content


Display = Literal["summarized", "omitted"]


class ThinkingEnabled(Struct, tag_field="type", tag="enabled"):
    budget_tokens: Positive
    display: Display | None = None


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive"):
    display: Display | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled"):
    pass


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(RequestBody, kw_only=True):
    """What a model reads before it answers."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "output_format": (),
    }
    successors: ClassVar[dict[str, str]] = {"output_format": "output_config.format"}
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "context_management", "speed"})

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=100_000)]
    system: str | list[SystemText] = ""
    tools: Annotated[list[ToolDefinition], Meta(max_length=512)] = msgspec.field(default_factory=list)
    tool_choice: MessageToolChoice = msgspec.field(default_factory=AnyOrNoTool)
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled = msgspec.field(
        default_factory=ThinkingDisabled
    )
    output_config: OutputConfig = msgspec.field(default_factory=OutputConfig)


class MessagesRequest(CountTokensRequest, kw_only=True):
    without_effect: ClassVar[frozenset[str]] = CountTokensRequest.without_effect | {
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "user_profile_id",
    }

    max_tokens: Annotated[int, RANGES["max_tokens"]]
    stream: bool = False
    temperature: Annotated[float, RANGES["temperature"]] | None = None
    top_p: Annotated[float, RANGES["top_p"]] | None = None
    top_k: Annotated[int, RANGES["top_k"]] | None = None
    stop_sequences: StopSequences | None = None


class TokenCount(Struct):
    input_tokens: int
