"""Tools as OpenAI's responses offer them, and the functions that those come down to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from vllm_metal.api.tools import (
    FunctionDefinition,
    FunctionName,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from vllm_metal.errors import InvalidRequest

_CALLABLE = ("function", "custom")
#: The arguments of a function that stands for a tool of free text.
_FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class ResponseTool(Struct, omit_defaults=True):
    """Functions, tools of free text (`custom`), and namespaces of both. Other kinds are run by OpenAI itself,
    and ignored here.
    """

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None

    @property
    def is_offered(self) -> bool:
        return self.type in (*_CALLABLE, "namespace")

    def echoed(self) -> dict[str, Any]:
        """As replies repeat it: with all that a tool of its type has to have."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        if self.type == "function":
            shown |= {"parameters": self.parameters, "strict": bool(self.strict)}
        if self.tools:
            shown["tools"] = [tool.echoed() for tool in self.tools]
        return shown


class ToolReference(Struct, omit_defaults=True):
    """A tool by its name, or with `mode` some of those that are offered."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolReference] | None = None


ResponseToolChoice = Literal["none", "auto", "required"] | ToolReference
ResponseTools = Annotated[list[ResponseTool], Meta(max_length=512)]


def flat_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the client's, and the function that stands for it."""

    name: str
    namespace: str | None
    is_custom: bool
    function: Tool

    def is_meant_by(self, reference: ToolReference) -> bool:
        """A reference need not tell the namespace."""
        return reference.name in (self.name, self.function.function.name) and reference.namespace in (
            None,
            self.namespace,
        )


def offered(tools: list[ResponseTool]) -> list[OfferedTool]:
    """Those that can be called. Raises InvalidRequest for one that has no name."""
    found = []
    for i, tool in enumerate(tools):
        if tool.type == "namespace":
            _require_name(tool, f"tools[{i}]")
            for j, inner in enumerate(tool.tools or ()):
                found += _offered(inner, f"tools[{i}].tools[{j}]", tool.name)
        else:
            found += _offered(tool, f"tools[{i}]")
    return found


def _offered(tool: ResponseTool, path: str, namespace: str | None = None) -> list[OfferedTool]:
    if tool.type not in _CALLABLE:
        return []
    name = _require_name(tool, path)
    definition = FunctionDefinition(
        flat_name(name, namespace), tool.description, tool.parameters, tool.strict
    )
    if tool.type == "custom":
        definition.description, definition.parameters = _about_free_text(tool), _FREE_TEXT
    return [OfferedTool(name, namespace, tool.type == "custom", Tool(definition))]


def _require_name(named: ResponseTool | ToolReference, path: str) -> str:
    if named.name is None:
        raise InvalidRequest(f"`{path}.name` is required", param=f"{path}.name")
    return named.name


def _about_free_text(tool: ResponseTool) -> str:
    """The model is told the grammar of the text; nothing holds it to that."""
    about, form = tool.description or "", tool.format or {}
    if form.get("type") == "grammar":
        about += f"\n\n`input` follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return about.strip()


def chosen(tools: list[OfferedTool], choice: ResponseToolChoice) -> tuple[list[Tool], ToolChoice]:
    """The functions to offer, and which of them to call. Raises InvalidRequest for what is not there."""
    if not isinstance(choice, ToolReference):
        return [tool.function for tool in tools], choice
    if choice.type == "allowed_tools":
        allowed = [
            _meant(reference, tools, f"tool_choice.tools[{i}]")
            for i, reference in enumerate(choice.tools or ())
            if reference.type in _CALLABLE
        ]
        return [tool.function for tool in tools if tool in allowed], choice.mode or "auto"
    one = _meant(choice, tools, "tool_choice")
    return [tool.function for tool in tools], NamedToolChoice(NamedFunction(one.function.function.name))


def _meant(reference: ToolReference, tools: list[OfferedTool], path: str) -> OfferedTool:
    if reference.type not in _CALLABLE:
        raise InvalidRequest(f"tools of type `{reference.type}` cannot be called", param=f"{path}.type")
    name = _require_name(reference, path)
    for tool in tools:
        if tool.is_meant_by(reference):
            return tool
    raise InvalidRequest(f"there is no tool `{name}` to choose", param=f"{path}.name")
