"""Requests of Anthropic's API as the chats that they are."""

from __future__ import annotations

from typing import ClassVar

from vllm_metal.api import message_turns
from vllm_metal.api.chat import ChatCompletionRequest, ChatMessage
from vllm_metal.api.generation import StreamOptions
from vllm_metal.api.message_tools import AnyOrNoTool, AnyTool, MessageToolChoice, NoTool, OneTool
from vllm_metal.api.message_turns import MessageTurns
from vllm_metal.api.messages import CountTokensRequest, MessagesRequest, ThinkingDisabled, ThinkingEnabled
from vllm_metal.api.structured_outputs import JsonSchemaFormat, NamedSchema
from vllm_metal.api.tools import NamedFunction, NamedToolChoice, Tool, ToolChoice
from vllm_metal.errors import InvalidRequest

#: What fields of the chat, and their values, are called here.
OWN_NAMES = {
    "required": "any",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
# Templates know no higher one.
_EFFORTS = {"xhigh": "high", "max": "high"}


class _Chat(ChatCompletionRequest, kw_only=True):
    """Of its tools those `told_later` are defined by messages."""

    # To Anthropic's API a budget is an aim, and its clients cannot have thinking enabled without one.
    insists_on_budget: ClassVar[bool] = False

    told_later: frozenset[str] = frozenset()

    @property
    def shown_tools(self) -> list[Tool]:
        return [tool for tool in self.tools if tool.function.name not in self.told_later]


def prompt(body: CountTokensRequest) -> ChatCompletionRequest:
    """All that the model reads. Raises InvalidRequest for what no chat can hold."""
    shown, deferred = _tools(body)
    turns = MessageTurns([*shown, *deferred])
    messages, goes_on = _with_beginning(turns.of(body.messages))
    shown_names = {tool.function.name for tool in shown}
    told_later = [tool for name, tool in turns.defined.items() if name not in shown_names]
    thinks = not isinstance(body.thinking, ThinkingDisabled)
    effort, format = body.output_config.effort, body.output_config.format
    if goes_on and format:
        raise InvalidRequest(
            "`output_config.format` cannot go with an answer that has begun", param="output_config.format"
        )
    return _Chat(
        model=body.model,
        messages=[*message_turns.of_system(body.system), *messages],
        continue_final_message=goes_on,
        tools=[*shown, *told_later],
        told_later=frozenset(tool.function.name for tool in told_later),
        tool_choice=_tool_choice(body.tool_choice),
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
    goes_on = False
    if messages and (last := messages[-1]).role == "assistant":
        if last.tool_calls:
            raise InvalidRequest("`messages` ends with a call that has no `tool_result`", param="messages")
        goes_on = bool(last.text.strip())
        messages = messages if goes_on else messages[:-1]
    if not messages:
        raise InvalidRequest("`messages` holds nothing to answer", param="messages")
    return messages, goes_on


def _tools(body: CountTokensRequest) -> tuple[list[Tool], list[Tool]]:
    """Those that the client itself runs: the ones to show at once, and the deferred."""
    # Where nobody could find them later, deferred ones are shown too.
    may_defer = not any(each.finds_others for each in body.tools)
    tools: tuple[list[Tool], list[Tool]] = ([], [])
    for i, each in enumerate(body.tools):
        if not each.is_anthropics:
            tools[may_defer and bool(each.defer_loading)].append(each.tool(f"tools[{i}]"))
    return tools


def _tool_choice(choice: MessageToolChoice) -> ToolChoice:
    match choice:
        case AnyOrNoTool():
            return "auto"
        case AnyTool():
            return "required"
        case OneTool(name):
            return NamedToolChoice(NamedFunction(name))
        case NoTool():
            return "none"
