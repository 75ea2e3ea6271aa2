"""What mlx-lm's parsers make of whole calls is what ours make of them."""

from __future__ import annotations

import importlib
import json
from itertools import product

import pytest

from tool_call_writers import TOOL, WRITERS, Call
from vllm_metal.parsing.answer import Answer
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.tool_formats import TOOL_FORMATS

PARSERS = {
    "hermes": "json_tools",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm47",
    "minimax_m2": "minimax_m2",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "longcat": "longcat",
    "minicpm5": "minicpm5",
    "muse": "muse_spark",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "function_gemma": "function_gemma",
    "lfm2": "pythonic",
}
CALLS: dict[str, Call] = {
    "text and numbers": ("get_weather", {"place": "Rome", "days": 3, "ratio": -0.5, "sure": True}),
    "no arguments": ("get_weather", {}),
    "nested": ("get_weather", {"options": {"a": [1, {"b": "c"}]}, "items": ["x", 2]}),
    "awkward text": ("get_weather", {"place": "Say {hi}: [“日本 🎉”]"}),
}
# It takes no arguments for a call of another form, and knows neither values in values nor braces in text.
EXCEPTIONS = {
    ("glm45", "no arguments"),
    ("longcat", "no arguments"),
    ("function_gemma", "nested"),
    ("function_gemma", "awkward text"),
}


def _ours(tool_format: str, text: str) -> list[Call]:
    parser = OutputParser(tool_format=TOOL_FORMATS[tool_format], tools=[TOOL])
    answer = Answer.of(parser.feed(text) + parser.finish())
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def _theirs(tool_format: str, text: str) -> list[Call]:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{PARSERS[tool_format]}")
    body = text.removeprefix(module.tool_call_start)
    parsed = module.parse_tool_call(body.removesuffix(module.tool_call_end), [TOOL])
    return [(call["name"], call["arguments"]) for call in (parsed if isinstance(parsed, list) else [parsed])]


@pytest.mark.parametrize(
    ("tool_format", "case"), [pair for pair in product(PARSERS, CALLS) if pair not in EXCEPTIONS]
)
def test_both_read_the_same(tool_format, case):
    text = WRITERS[tool_format]([CALLS[case]])
    assert _ours(tool_format, text) == _theirs(tool_format, text) == [CALLS[case]]
