"""What the messages of Anthropic's API hold, on the way in: blocks of content."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from vllm_metal.api.message_tools import ToolDefinition


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    data: str | None = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = msgspec.field(default_factory=dict)


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    tool_name: str


class NamedTool(Struct, tag_field="type", tag="tool_reference"):
    name: str


class DefinedTool(Struct, tag_field="type", tag="tool_definition"):
    definition: ToolDefinition


class ToolAdditionBlock(Struct, tag_field="type", tag="tool_addition"):
    tool: NamedTool | DefinedTool


class RemovedTool(Struct):
    type: Literal["tool_reference"]
    name: str


class ToolRemovalBlock(Struct, tag_field="type", tag="tool_removal"):
    tool: RemovedTool


class ImageBlock(Struct, tag_field="type", tag="image"):
    pass


class DocumentBlock(Struct, tag_field="type", tag="document"):
    pass


class SystemText(Struct):
    type: Literal["text"]
    text: str


class SystemBlock(Struct, tag_field="type", tag="mid_conv_system"):
    """What a message of role `system` says, inside another message."""

    content: list[SystemText]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | SystemBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
    | ImageBlock
    | DocumentBlock
)
