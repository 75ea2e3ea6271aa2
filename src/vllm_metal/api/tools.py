"""Tools that a request offers, and which of them the answer may or must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from vllm_metal.errors import InvalidRequest

_MAX_BYTES = 1 << 20

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class FunctionDefinition(Struct):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments, which are always an object."""
        parameters = self.function.parameters or {}
        if not parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **parameters}

    def for_template(self) -> dict[str, Any]:
        """Templates count on all of this, and know of no more."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.schema,
        }
        return {"type": self.type, "function": function}


class NamedFunction(Struct):
    name: str


class NamedToolChoice(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
Tools = Annotated[list[Tool], Meta(max_length=512)]


def check(tools: list[Tool], choice: ToolChoice) -> None:
    """Raises InvalidRequest, naming the field."""
    if not tools and (choice == "required" or isinstance(choice, NamedToolChoice)):
        raise InvalidRequest("`tool_choice` needs `tools`", param="tool_choice")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name, param = tool.function.name, f"tools[{i}].function"
        if name in names:
            raise InvalidRequest(f"two tools have the name `{name}`", param=f"{param}.name")
        names.add(name)
        if tool.schema["type"] != "object":
            raise InvalidRequest(
                f"the parameters of `{name}` must be a JSON schema of type `object`",
                param=f"{param}.parameters",
            )
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"there is no tool `{choice.function.name}` to choose", param="tool_choice.function.name"
        )
    if len(msgspec.json.encode(tools)) > _MAX_BYTES:
        raise InvalidRequest(f"`tools` must not take more than {_MAX_BYTES} bytes", param="tools")
