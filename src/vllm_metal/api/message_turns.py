"""The messages of Anthropic's API as those of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
from msgspec import Struct

from vllm_metal.api.chat import ChatMessage, FunctionCall, ToolCall
from vllm_metal.api.message_content import (
    Block,
    DefinedTool,
    DocumentBlock,
    ImageBlock,
    NamedTool,
    RedactedThinkingBlock,
    SystemBlock,
    SystemText,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from vllm_metal.api.messages import InputMessage
from vllm_metal.api.past_answer import PastAnswer
from vllm_metal.api.sealed_text import seal, unseal
from vllm_metal.api.tools import Tool
from vllm_metal.errors import InvalidRequest

#: Begins a block of the system prompt that is meant for Anthropic's bills. What it says can change from one
#: request to the next, and the first thing in a prompt must not, or nothing kept of the one before fits.
_BILLING = "x-anthropic-billing-header:"
_CALL_ID = "toolu_"

# A block and its path.
_Located = tuple[str, Block]


def of_system(system: str | Iterable[SystemText]) -> list[ChatMessage]:
    """The message that begins the chat, if any."""
    texts = [system] if isinstance(system, str) else [each.text for each in system]
    text = _paragraphs(each for each in texts if not each.startswith(_BILLING))
    return [ChatMessage("system", text)] if text else []


def call_id(id: str) -> str:
    """An id in the letters that Anthropic's have; `_own_id` has the model's own back from it."""
    return _CALL_ID + seal(id)


def _own_id(call_id: str) -> str:
    """That of a call which another server has made stays as it is."""
    own = unseal(call_id.removeprefix(_CALL_ID)) if call_id.startswith(_CALL_ID) else None
    return own or call_id


class MessageTurns:
    """Messages may define tools, of which they can name `known` ones: then `defined` has them."""

    def __init__(self, known: Iterable[Tool]) -> None:
        self.defined: dict[str, Tool] = {}
        self._known = {tool.function.name: tool for tool in known}

    def of(self, messages: Sequence[InputMessage]) -> list[ChatMessage]:
        """Messages of one role in a row are one turn. Raises InvalidRequest, naming the block."""
        turns: list[ChatMessage] = []
        for role, group in groupby(enumerate(messages), key=lambda each: each[1].role):
            blocks = [
                (f"messages[{i}].content[{j}]", block)
                for i, message in group
                for j, block in enumerate(message.blocks)
            ]
            match role:
                case "user":
                    turns += self._user(blocks)
                case "assistant":
                    turns.append(_assistant(blocks))
                case "system":
                    turns.append(ChatMessage("system", self._told(blocks, role)))
        return turns

    def _user(self, blocks: Sequence[_Located]) -> Iterator[ChatMessage]:
        for is_text, group in groupby(blocks, key=lambda each: isinstance(each[1], TextBlock)):
            if is_text:
                yield ChatMessage("user", self._told(group, "user"))
                continue
            for path, block in group:
                match block:
                    case ToolResultBlock(id):
                        yield ChatMessage("tool", self._result(path, block), tool_call_id=_own_id(id))
                    case SystemBlock(texts):
                        yield ChatMessage("system", _paragraphs(each.text for each in texts))
                    case _:
                        raise _misplaced(path, block, "user")

    def _result(self, path: str, result: ToolResultBlock) -> str:
        content = result.content or ""
        if not isinstance(content, str):
            blocks = ((f"{path}.content[{i}]", block) for i, block in enumerate(content))
            content = self._told(blocks, "user")
        # Templates have no other way to say it.
        return f"The tool failed: {content}" if result.is_error else content

    def _told(self, blocks: Iterable[tuple[str, Block | ToolReferenceBlock]], role: str) -> str:
        return _paragraphs(self._text(path, block, role) for path, block in blocks)

    def _text(self, path: str, block: Block | ToolReferenceBlock, role: str) -> str:
        match block:
            case TextBlock(text):
                return text
            case ToolReferenceBlock(name):
                return self._defined(name)
            case ToolAdditionBlock(DefinedTool(definition)):
                tool = definition.tool(f"{path}.tool.definition")
                self._known[tool.function.name] = tool
                return self._defined(tool.function.name)
            case ToolAdditionBlock(NamedTool(name)):
                return self._defined(name)
            case ToolRemovalBlock(tool):
                self.defined.pop(tool.name, None)
                return f"The tool `{tool.name}` cannot be called any more."
        raise _misplaced(path, block, role)

    def _defined(self, name: str) -> str:
        """The definition, told as Claude Code announces it to the model: where it is asked for, so that the
        tools at the beginning of the prompt, and all that is kept of it, stay the same.
        """
        tool = self._known.get(name)
        if tool is None:
            return f"There is no tool `{name}`."
        self.defined[name] = tool
        function = msgspec.json.encode(tool.for_template()["function"]).decode()
        return f"<functions>\n<function>{function}</function>\n</functions>"


def _assistant(blocks: Sequence[_Located]) -> ChatMessage:
    answer = PastAnswer()
    for path, block in blocks:
        match block:
            case TextBlock(text):
                answer.texts.append(text)
            case ThinkingBlock(thinking, signature):
                answer.thoughts.append(thinking or unseal(signature or "") or "")
            case RedactedThinkingBlock():
                pass  # Only the server that wrote it could read it.
            case ToolUseBlock(id, name, input):
                function = FunctionCall(name, msgspec.json.encode(input).decode())
                answer.calls.append(ToolCall(function, _own_id(id)))
            case _:
                raise _misplaced(path, block, "assistant")
    return answer.message()


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(texts)


def _misplaced(path: str, block: Struct, role: str) -> InvalidRequest:
    kind, param = block.__struct_config__.tag, f"{path}.type"
    if isinstance(block, ImageBlock | DocumentBlock):
        return InvalidRequest(f"`{path}`: content of type `{kind}` is not supported yet", param=param)
    return InvalidRequest(f"`{path}`: a message of role `{role}` cannot hold `{kind}`", param=param)
