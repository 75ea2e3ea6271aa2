"""What a client brings back of an answer is rendered as the model wrote it, so that its KV is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

import tokenizer_packages
from vllm_metal.api.decoding import decode
from vllm_metal.api.responses import ResponsesRequest
from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_formats import REASONING_FORMATS
from vllm_metal.parsing.tool_formats import TOOL_FORMATS
from vllm_metal.server.response_output import OutputWriter

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "é\\"/"}}\n</tool_call>'
ASKED = [{"role": "developer", "content": "Rules."}, {"role": "user", "content": "Do it."}]


@pytest.fixture(scope="module")
def qwen3(cache_dir: Path) -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(tokenizer_packages.tokenizer("qwen3", cache_dir)))


def prompt(qwen3: Tokenizer, items: list[Any]) -> str:
    body = {"input": items, "tools": [TOOL], "instructions": "Be brief."}
    request = decode(msgspec.json.encode(body), ResponsesRequest)
    chat = request.chat(request.items())
    token_ids = qwen3.apply_chat_template(chat.template_messages(), **chat.template_kwargs())
    return qwen3.decode(token_ids, skip_special_tokens=False)


def answered(text: str, *, sealed: bool) -> list[Any]:
    """The items of an answer; of reasoning that is sealed nothing else comes back."""
    parser = OutputParser(
        reasoning_format=REASONING_FORMATS["qwen3"],
        tool_format=TOOL_FORMATS["hermes"],
        tools=[{"type": "function", "function": TOOL}],
    )
    writer = OutputWriter([], seals_reasoning=sealed)
    for event in parser.feed(text) + parser.finish():
        list(writer.write(event, []))
    list(writer.finish("completed"))
    items = msgspec.to_builtins(writer.items)
    if sealed:
        for item in items:
            if item["type"] == "reasoning":
                del item["content"]
    return items


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"<think>\nHm. é\n</think>\n\n{CALL}",
        f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}",
    ],
)
def test_the_next_prompt_begins_with_the_last_and_its_answer(
    qwen3: Tokenizer, text: str, sealed: bool
) -> None:
    items = answered(text, sealed=sealed)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Done."}
        for item in items
        if item["type"] == "function_call"
    ]
    assert prompt(qwen3, [*ASKED, *items, *results]).startswith(prompt(qwen3, ASKED) + text)
