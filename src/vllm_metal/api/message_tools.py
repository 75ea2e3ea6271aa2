"""Tools as Anthropic's API offers them, and which of them the answer may or must call."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from vllm_metal.api.tools import FunctionDefinition, FunctionName, Tool
from vllm_metal.errors import InvalidRequest


class ToolDefinition(Struct):
    """A deferred tool is not told to the model before a message refers to it."""

    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def is_anthropics(self) -> bool:
        """Whether Anthropic's servers or models bring it along; clients offer such to any server."""
        return self.type not in (None, "custom")

    @property
    def finds_others(self) -> bool:
        """Whether it is what would find deferred tools on Anthropic's servers."""
        return (self.type or "").startswith("tool_search")

    def tool(self, path: str) -> Tool:
        """Raises InvalidRequest, naming the field below `path`."""
        if self.name is None or self.input_schema is None:
            missing = f"{path}.{'name' if self.name is None else 'input_schema'}"
            raise InvalidRequest(f"`{missing}` is required", param=missing)
        return Tool(FunctionDefinition(self.name, self.description, self.input_schema, self.strict))


class AnyOrNoTool(Struct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyTool(Struct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class OneTool(Struct, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoTool(Struct, tag_field="type", tag="none"):
    pass


MessageToolChoice = AnyOrNoTool | AnyTool | OneTool | NoTool
