"""What a client brings back of an answer is rendered as the model wrote it, so that its KV is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

import tokenizer_packages
from chat_prompt import encode_chat
from vllm_metal.api import messages_as_chats
from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.api.decoding import decode
from vllm_metal.api.messages import MessagesRequest
from vllm_metal.api.responses import ResponsesRequest
from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.parsing.events import Event
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_formats import REASONING_FORMATS
from vllm_metal.parsing.tool_formats import TOOL_FORMATS
from vllm_metal.server.block_writer import BlockWriter, joined
from vllm_metal.server.response_output import OutputWriter

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "é\\"/"}}\n</tool_call>'
TEXTS = [
    f"<think>\nHm. é\n</think>\n\n{CALL}",
    f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}",
]


@pytest.fixture(scope="module")
def qwen3(cache_dir: Path) -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(tokenizer_packages.tokenizer("qwen3", cache_dir)))


def rendered(qwen3: Tokenizer, chat: ChatCompletionRequest) -> str:
    token_ids = encode_chat(qwen3, chat.template_messages(), **chat.template_kwargs())
    return qwen3.decode(token_ids, skip_special_tokens=False)


def read(text: str) -> list[Event]:
    parser = OutputParser(
        reasoning_format=REASONING_FORMATS["qwen3"],
        tool_format=TOOL_FORMATS["hermes"],
        tools=[{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    )
    return parser.feed(text) + parser.finish()


def response_prompt(qwen3: Tokenizer, *more: Any) -> str:
    body = {
        "input": [{"role": "developer", "content": "Rules."}, {"role": "user", "content": "Do it."}, *more],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "instructions": "Be brief.",
    }
    request = decode(msgspec.json.encode(body), ResponsesRequest)
    return rendered(qwen3, request.chat(request.items()))


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("text", [CALL, *TEXTS])
def test_a_response_goes_on(qwen3: Tokenizer, text: str, sealed: bool) -> None:
    """Of reasoning that is sealed nothing else comes back."""
    writer = OutputWriter([], seals_reasoning=sealed)
    for event in read(text):
        list(writer.write(event, []))
    list(writer.finish("completed"))
    items = msgspec.to_builtins(writer.items)
    for item in items:
        if sealed and item["type"] == "reasoning":
            del item["content"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Done."}
        for item in items
        if item["type"] == "function_call"
    ]
    assert response_prompt(qwen3, *items, *results).startswith(response_prompt(qwen3) + text)


def message_prompt(qwen3: Tokenizer, display: str, *more: Any) -> str:
    """As Claude Code asks: with another bill each time."""
    bill = f"x-anthropic-billing-header: cch={len(more)};"
    body = {
        "max_tokens": 1,
        "system": [{"type": "text", "text": text} for text in (bill, "Be brief.")],
        "messages": [{"role": "user", "content": "Do it."}, *more],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive", "display": display},
    }
    return rendered(qwen3, messages_as_chats.chat(decode(msgspec.json.encode(body), MessagesRequest)))


@pytest.mark.parametrize("display", ["omitted", "summarized"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_message_goes_on(qwen3: Tokenizer, text: str, display: str) -> None:
    writer = BlockWriter(shows_thinking=display != "omitted")
    blocks = msgspec.to_builtins(joined([*writer.write(read(text)), *writer.end()]))
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "Done."}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    turns = [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
        {"role": "system", "content": "Be quick."},
    ]
    assert message_prompt(qwen3, display, *turns).startswith(message_prompt(qwen3, display) + text)
