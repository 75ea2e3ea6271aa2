"""The format is found by what a chat template writes, then by its marks, then by the vocabulary's."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from jinja2 import Environment

from vllm_metal.errors import ConfigError
from vllm_metal.parsing import detection, reasoning_formats, tool_formats

TURNS = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}{% for call in message.tool_calls %}CALL{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""

HERMES = """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
FUNCTION_TAGS = (
    "<function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function>"
)
ARGUMENTS_AS_TEXT = "<function={{ call.function.name }}>{{ '' + call.function.arguments }}</function>"


def model(template: str, vocabulary: Collection[str] = ()) -> detection.Model:
    compiled = Environment().from_string(template)
    return detection.Model(
        template,
        vocabulary,
        lambda messages, *, tools, add_generation_prompt: compiled.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
        ),
    )


def tool_format(*args, name: str | None = None) -> str | None:
    choice = detection.tool_format(model(*args), name)
    assert choice.reason
    return choice.format and choice.format.name


def reasoning_format(*args, name: str | None = None) -> str | None:
    choice = detection.reasoning_format(model(*args), name)
    assert choice.reason
    return choice.format and choice.format.name


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (HERMES, "hermes"),
        (f"<tool_call>{FUNCTION_TAGS}</tool_call>", "qwen3_coder"),
        (f"<seed:tool_call>{FUNCTION_TAGS}</seed:tool_call>", "seed_oss"),
        (ARGUMENTS_AS_TEXT, "functionary_v3"),
        ("A: {{ call.function.name }} {{ call.function.arguments }}", None),
    ],
)
def test_the_format_is_the_one_that_reads_what_the_template_writes(written, expected):
    assert tool_format(TURNS.replace("CALL", written)) == expected


def test_a_template_that_writes_no_calls_is_searched_for_marks():
    describes = "Tools: {{ tools }} Answer with <tool_call>{...}</tool_call>" + TURNS.replace("CALL", "")
    assert tool_format(describes) == "hermes"
    describes = "Tools: {{ tools }} [TOOL_CALLS] {{ messages.nothing.here }}"
    assert tool_format(describes) == "mistral"


def test_then_the_vocabulary_is():
    vocabulary = {"<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"}
    assert tool_format("{{ tools }}", vocabulary) == "lfm2"
    assert reasoning_format("{{ messages }}", vocabulary) == "qwen3"


def test_no_format_is_made_up():
    assert tool_format("{{ messages }}", {"<tool_call>", "</tool_call>"}) is None
    assert tool_format("", ()) is None
    assert reasoning_format("{{ messages }}") is None


def test_reasoning_is_found_by_what_the_template_writes():
    assert reasoning_format(TURNS.replace("CALL", "")) == "qwen3"
    tags = TURNS.replace("<think>", "<seed:think>").replace("</think>", "</seed:think>")
    assert reasoning_format(tags) == "seed_oss"


@pytest.mark.parametrize("name", [*tool_formats.TOOL_FORMATS, *tool_formats.ALIASES])
def test_a_tool_format_may_be_asked_for(name):
    assert tool_format("", name=name) == tool_formats.ALIASES.get(name, name)


@pytest.mark.parametrize("name", [*reasoning_formats.REASONING_FORMATS, *reasoning_formats.ALIASES])
def test_a_reasoning_format_may_be_asked_for(name):
    assert reasoning_format("", name=name) == reasoning_formats.ALIASES.get(name, name)


def test_an_unknown_name_is_an_error_that_lists_the_known():
    with pytest.raises(ConfigError, match="no tool format `hermse`") as caught:
        tool_format("", name="hermse")
    assert "hermes" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="no reasoning format `x`"):
        reasoning_format("", name="x")
