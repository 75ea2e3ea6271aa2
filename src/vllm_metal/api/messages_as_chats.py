"""Requests of Anthropic's API as the chats that they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from vllm_metal.api import message_turns
from vllm_metal.api.chat import ChatCompletionRequest, ChatMessage
from vllm_metal.api.generation import StreamOptions
from vllm_metal.api.messages import (
    AnyOrNoTool,
    AnyTool,
    CountTokensRequest,
    MessagesRequest,
    NoTool,
    OneTool,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolDefinition,
)
from vllm_metal.api.structured_outputs import JsonSchemaFormat, NamedSchema
from vllm_metal.api.tools import FunctionDefinition, NamedFunction, NamedToolChoice, Tool, ToolChoice
from vllm_metal.errors import InvalidRequest

# Templates know no higher one.
_EFFORTS = {"xhigh": "high", "max": "high"}


class _Chat(ChatCompletionRequest, kw_only=True):
    # To Anthropic's API a budget is an aim, and its clients cannot have thinking enabled without one.
    insists_on_budget: ClassVar[bool] = False


def prompt(body: CountTokensRequest) -> ChatCompletionRequest:
    """All that the model reads. Raises InvalidRequest for what no chat can hold."""
    messages, goes_on = _with_beginning(message_turns.of_messages(body.messages))
    thinks = not isinstance(body.thinking, ThinkingDisabled)
    effort, format = body.output_config.effort, body.output_config.format
    return _Chat(
        model=body.model,
        messages=[*message_turns.of_system(body.system), *messages],
        continue_final_message=goes_on,
        tools=list(_tools(body.tools)),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", False),
        reasoning_effort=_EFFORTS.get(effort, effort) if effort else None,
        include_reasoning=thinks,
        chat_template_kwargs={"enable_thinking": thinks, "thinking": thinks},
        response_format=JsonSchemaFormat(NamedSchema(format.schema)) if format else None,
    )


def chat(body: MessagesRequest) -> ChatCompletionRequest:
    """Raises InvalidRequest as `prompt` does."""
    chat = prompt(body)
    if isinstance(body.thinking, ThinkingEnabled):
        chat.thinking_token_budget = body.thinking.budget_tokens
    chat.max_tokens = body.max_tokens
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    # The first event of a stream tells how much of the prompt was kept.
    chat.stream_options = StreamOptions(continuous_usage_stats=True)
    return chat


def _with_beginning(messages: list[ChatMessage]) -> tuple[list[ChatMessage], bool]:
    """The messages, and whether the answer goes on with the last of them."""
    last = messages[-1]
    if last.role != "assistant":
        return messages, False
    if last.tool_calls:
        raise InvalidRequest("`messages` ends with a call that has no `tool_result`", param="messages")
    return (messages, True) if last.text else (messages[:-1], False)


def _tools(definitions: Sequence[ToolDefinition]) -> Iterator[Tool]:
    """Those that the client itself runs: others are left out, since clients name some whatever the server."""
    for i, each in enumerate(definitions):
        if each.type not in (None, "custom"):
            continue
        if each.name is None or each.input_schema is None:
            missing = f"tools[{i}].{'name' if each.name is None else 'input_schema'}"
            raise InvalidRequest(f"`{missing}` is required", param=missing)
        yield Tool(FunctionDefinition(each.name, each.description, each.input_schema, each.strict))


def _tool_choice(body: CountTokensRequest) -> ToolChoice:
    match body.tool_choice:
        case AnyOrNoTool():
            return "auto"
        case AnyTool():
            return "required"
        case OneTool(name):
            return NamedToolChoice(NamedFunction(name))
        case NoTool():
            return "none"
