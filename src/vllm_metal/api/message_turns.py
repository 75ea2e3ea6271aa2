"""The messages of Anthropic's API as those of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from vllm_metal.api.chat import ChatMessage, FunctionCall, ToolCall
from vllm_metal.api.message_content import (
    Block,
    DocumentBlock,
    ImageBlock,
    RedactedThinkingBlock,
    SystemBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from vllm_metal.api.messages import InputMessage
from vllm_metal.api.sealed_text import seal, unseal
from vllm_metal.errors import InvalidRequest

#: Begins a block of the system prompt that is meant for Anthropic's bills. What it says can change from one
#: request to the next, and the first thing in a prompt must not, or nothing kept of the one before fits.
_BILLING = "x-anthropic-billing-header:"
_CALL_ID = "toolu_"

# A block and its path.
_Located = tuple[str, Block]


def of_system(system: str | Sequence[TextBlock]) -> list[ChatMessage]:
    blocks = [TextBlock(system)] if isinstance(system, str) else system
    text = _paragraphs(block.text for block in blocks if not block.text.startswith(_BILLING))
    return [ChatMessage("system", text)] if text else []


def of_messages(messages: Sequence[InputMessage]) -> list[ChatMessage]:
    """Messages of one role in a row are one turn. Raises InvalidRequest, naming the block."""
    turns: list[ChatMessage] = []
    for role, group in groupby(enumerate(messages), key=lambda each: each[1].role):
        blocks = [
            (f"messages[{i}].content[{j}]", block)
            for i, message in group
            for j, block in enumerate(message.blocks)
        ]
        turns += _TURNS[role](blocks)
    return turns


def call_id(id: str) -> str:
    """An id in the letters that Anthropic's have; `_own_id` has the model's own back from it."""
    return _CALL_ID + seal(id)


def _own_id(call_id: str) -> str:
    """That of a call which another server has made stays as it is."""
    return unseal(call_id.removeprefix(_CALL_ID)) or call_id


def _user(blocks: Sequence[_Located]) -> Iterator[ChatMessage]:
    for kind, group in groupby(blocks, key=lambda each: type(each[1])):
        if kind is TextBlock:
            yield ChatMessage("user", _paragraphs(_text(*each) for each in group))
            continue
        for path, block in group:
            match block:
                case ToolResultBlock(id):
                    yield ChatMessage("tool", _result(path, block), tool_call_id=_own_id(id))
                case SystemBlock(texts):
                    yield ChatMessage("system", _paragraphs(each.text for each in texts))
                case _:
                    raise _misplaced(path, block, "user")


def _system(blocks: Sequence[_Located]) -> Iterator[ChatMessage]:
    yield ChatMessage("system", _paragraphs(_text(*each) for each in blocks))


def _assistant(blocks: Sequence[_Located]) -> Iterator[ChatMessage]:
    turn = ChatMessage("assistant", "")
    for path, block in blocks:
        match block:
            case TextBlock(text):
                # What one answer said before a call and behind it.
                turn.content = turn.text + text
            case ThinkingBlock(thinking, signature):
                turn.reasoning = (turn.reasoning or "") + (thinking or unseal(signature or "") or "")
            case RedactedThinkingBlock():
                pass  # Only the server that wrote it could read it.
            case ToolUseBlock(id, name, input):
                call = ToolCall(FunctionCall(name, msgspec.json.encode(input).decode()), _own_id(id))
                turn.tool_calls = [*(turn.tool_calls or []), call]
            case _:
                raise _misplaced(path, block, "assistant")
    yield turn


_TURNS: dict[str, Callable[[Sequence[_Located]], Iterator[ChatMessage]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _result(path: str, result: ToolResultBlock) -> str:
    content = result.content or ""
    if not isinstance(content, str):
        content = _paragraphs(_text(f"{path}.content[{i}]", block) for i, block in enumerate(content))
    # Templates have no other way to say it.
    return f"The tool failed: {content}" if result.is_error else content


def _text(path: str, block: Block | ToolReferenceBlock) -> str:
    match block:
        case TextBlock(text):
            return text
        case ToolReferenceBlock(name):
            return f"The tool `{name}` can be called."
    raise _misplaced(path, block, "system")


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(texts)


def _misplaced(path: str, block: Block, role: str) -> InvalidRequest:
    kind, param = block.__struct_config__.tag, f"{path}.type"
    if isinstance(block, ImageBlock | DocumentBlock):
        return InvalidRequest(f"`{path}`: content of type `{kind}` is not supported yet", param=param)
    return InvalidRequest(f"`{path}`: a message of role `{role}` cannot hold `{kind}`", param=param)
