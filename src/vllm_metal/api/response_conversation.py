"""The chat that the items of a response amount to."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vllm_metal.api.chat import ChatMessage, FunctionCall, ToolCall
from vllm_metal.api.response_items import InputItem
from vllm_metal.api.response_tools import flat_name

_SYSTEM_ROLES = ("system", "developer")


def messages(instructions: str | None, items: Iterable[InputItem]) -> list[ChatMessage]:
    """What the model wrote in one answer is one message again, so that its template writes the same again and
    the KV of the answer is found. So are the instructions that come first, since many templates know of only
    one such message.
    """
    chat: list[ChatMessage] = []
    if instructions is not None:
        chat.append(ChatMessage("system", instructions))
    for item in items:
        match item.type:
            case "message" if item.role == "assistant":
                message = _answer(chat)
                message.content = f"{message.content or ''}{item.text}"
            case "message":
                _tell(chat, item)
            case "reasoning":
                if item.reasoning:
                    message = _answer(chat)
                    message.reasoning = f"{message.reasoning or ''}{item.reasoning}"
            case "function_call" | "custom_tool_call":
                message = _answer(chat, may_go_on=True)
                message.tool_calls = [*(message.tool_calls or ()), _call(item)]
            case _:
                chat.append(ChatMessage("tool", item.text, tool_call_id=item.call_id))
    return chat


def _answer(chat: list[ChatMessage], *, may_go_on: bool = False) -> ChatMessage:
    """The answer that an item belongs to: one that has come to an end with text can only go on with calls."""
    last = chat[-1] if chat else None
    if last is None or last.role != "assistant" or (last.content and not last.tool_calls and not may_go_on):
        last = ChatMessage("assistant")
        chat.append(last)
    return last


def _tell(chat: list[ChatMessage], item: InputItem) -> None:
    assert item.role is not None
    if item.role in _SYSTEM_ROLES and len(chat) == 1 and chat[0].role in _SYSTEM_ROLES:
        chat[0].content = f"{chat[0].text}\n\n{item.text}"
    else:
        chat.append(ChatMessage(item.role, item.text))


def _call(item: InputItem) -> ToolCall:
    assert item.name is not None
    arguments = item.arguments
    if item.type == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.input}).decode()
    return ToolCall(FunctionCall(flat_name(item.name, item.namespace), arguments or "{}"), item.call_id)
