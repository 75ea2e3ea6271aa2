"""The chat that the items of a response amount to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec

from vllm_metal.api.chat import ChatMessage, FunctionCall, ToolCall
from vllm_metal.api.past_answer import PastAnswer
from vllm_metal.api.response_items import InputItem
from vllm_metal.api.response_tools import flat_name


def messages(instructions: str | None, items: Sequence[InputItem]) -> list[ChatMessage]:
    """What the model wrote in one answer is one message again, so that its template writes the same again and
    the KV of the answer is found. So are the instructions that come first, since many templates know of only
    one such message.
    """
    instructing = list(takewhile(_instructs, items))
    told = [*([] if instructions is None else [instructions]), *(item.text for item in instructing)]
    chat: list[ChatMessage | PastAnswer] = [ChatMessage("system", "\n\n".join(told))] if told else []
    for item in items[len(instructing) :]:
        match item.kind:
            case "message" if item.role == "assistant":
                answer = _answer(chat)
                if item.text:
                    answer.texts.append(item.text)
            case "message":
                assert item.role is not None
                chat.append(ChatMessage(item.role, item.text))
            case "reasoning":
                if item.reasoning:
                    _answer(chat).thoughts.append(item.reasoning)
            case "function_call" | "custom_tool_call":
                _answer(chat, may_go_on=True).calls.append(_call(item))
            case _:
                chat.append(ChatMessage("tool", item.text, tool_call_id=item.call_id))
    return [each.message() if isinstance(each, PastAnswer) else each for each in chat]


def _instructs(item: InputItem) -> bool:
    return item.kind == "message" and item.role in ("system", "developer")


def _answer(chat: list[ChatMessage | PastAnswer], *, may_go_on: bool = False) -> PastAnswer:
    """The answer that an item belongs to: one that has come to an end with text can only go on with calls."""
    last = chat[-1] if chat else None
    if not isinstance(last, PastAnswer) or (last.texts and not last.calls and not may_go_on):
        last = PastAnswer()
        chat.append(last)
    return last


def _call(item: InputItem) -> ToolCall:
    assert item.name is not None
    arguments = item.arguments
    if item.kind == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.input}).decode()
    return ToolCall(FunctionCall(flat_name(item.name, item.namespace), arguments or "{}"), item.call_id)
