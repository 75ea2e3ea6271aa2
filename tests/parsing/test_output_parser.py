"""Answers in every format are told apart, and however their text is cut, the same is said of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tool_call_writers import TOOL, WRITERS, Call
from vllm_metal.parsing.answer import Answer
from vllm_metal.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    append,
)
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_formats import REASONING_FORMATS
from vllm_metal.parsing.tool_formats import TOOL_FORMATS

NAME = "get_weather"
UNMARKED = {name for name, each in TOOL_FORMATS.items() if each.unmarked}
CALLS: dict[str, list[Call]] = {
    "one": [(NAME, {"place": "Rome", "days": 3})],
    "two": [(NAME, {"place": "Rome"}), (NAME, {"days": -1, "sure": True})],
    "no arguments": [(NAME, {})],
    "nested": [(NAME, {"options": {"a": [1, {"b": None}], "c": {}}, "items": [], "ratio": 0.5})],
    "awkward text": [(NAME, {"place": "a \"b\" {c} [d], \\e\\n 'f' <g> 日本 🎉\n\tnext", "note": "}"})],
}


def parser(
    tool_format: str | None = None, reasoning: str | None = None, *, in_reasoning: bool = False
) -> OutputParser:
    return OutputParser(
        tool_format=TOOL_FORMATS[tool_format] if tool_format else None,
        reasoning_format=REASONING_FORMATS[reasoning] if reasoning else None,
        tools=[TOOL],
        in_reasoning=in_reasoning,
    )  # fmt: skip


def parse(output_parser: OutputParser, *pieces: str, finish: bool = True) -> list[Event]:
    """All events, joined, with ids that do not differ from parse to parse."""
    events: list[Event] = []
    for piece in pieces:
        for event in output_parser.feed(piece):
            append(events, event)
    for event in output_parser.finish() if finish else []:
        append(events, event)
    return [replace(event, id="") if isinstance(event, ToolCallStart) else event for event in events]


def answer(tool_format: str | None, text: str, reasoning: str | None = None) -> Answer:
    return Answer.of(parse(parser(tool_format, reasoning), text))


def calls_of(parsed: Answer) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


def written(tool_format: str, calls: list[Call]) -> str:
    return WRITERS[tool_format](calls)


def test_there_is_a_writer_for_every_format():
    assert WRITERS.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
class TestEveryFormat:
    def test_calls_are_read(self, tool_format):
        for calls in CALLS.values():
            parsed = answer(tool_format, written(tool_format, calls))
            assert calls_of(parsed) == calls
            assert all(call.complete for call in parsed.tool_calls)
            assert parsed.content == ""

    def test_text_around_is_kept(self, tool_format):
        before = "" if tool_format in UNMARKED else "Let me look: [1] {x}\n\n"
        for calls in CALLS.values():
            parsed = answer(tool_format, f"{before}{written(tool_format, calls)}\nThat is <all>.")
            assert calls_of(parsed) == calls
            assert parsed.content == f"{before.rstrip()}That is <all>."

    def test_every_cut_in_two_gives_the_same(self, tool_format):
        for calls in CALLS.values():
            text = written(tool_format, calls) + " Done"
            whole = parse(parser(tool_format), text)
            assert parse(parser(tool_format), *text) == whole
            for cut in range(len(text)):
                assert parse(parser(tool_format), text[:cut], text[cut:]) == whole

    def test_an_answer_cut_off_loses_nothing(self, tool_format):
        for calls in CALLS.values():
            text = written(tool_format, calls)
            for cut in range(len(text)):
                parsed = answer(tool_format, text[:cut])
                if not parsed.tool_calls:
                    assert parsed.content == text[:cut]
                complete = [call for call in parsed.tool_calls if call.complete]
                assert calls_of(Answer(tool_calls=complete)) == calls[: len(complete)]
                assert len(parsed.tool_calls) - len(complete) <= 1


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_the_name_comes_before_the_arguments_end(tool_format):
    text = written(tool_format, [(NAME, {"place": "x" * 100})])
    early = parse(parser(tool_format), text[: text.index("x" * 100) + 50], finish=False)
    assert early[0] == ToolCallStart(0, "", NAME)
    assert isinstance(early[1], ToolCallArguments)
    assert early[1].text.endswith("x")


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_calls_are_numbered_and_have_ids_of_their_own(tool_format):
    text = written(tool_format, [(NAME, {})] * 3)
    events = parser(tool_format).feed(text)
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.index for start in starts] == [0, 1, 2]
    assert len({start.id for start in starts}) == 3


# Values and cuts


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_OBJECT_FORMATS = ("hermes", "mistral", "kimi_k2", "deepseek_v3", "llama3_json", "cohere", "openai")


@settings(deadline=None)
@given(st.data(), st.sampled_from(_OBJECT_FORMATS), st.dictionaries(st.text(), _JSON, max_size=3))
def test_any_json_comes_through(data, tool_format, arguments):
    text = written(tool_format, [(NAME, arguments)])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = parse(parser(tool_format), *pieces)
    assert events == parse(parser(tool_format), text)
    assert calls_of(Answer.of(events)) == [(NAME, arguments)]


_TEXT = st.characters(exclude_categories=["Cs"])
_TAGGED_FORMATS = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v32", "kimi_k3", "gemma4")


@settings(deadline=None)
@given(st.text(_TEXT), st.sampled_from(["lfm2", "pythonic"]))
def test_any_python_string_comes_through(text, tool_format):
    calls = [(NAME, {"place": text})]
    assert calls_of(answer(tool_format, written(tool_format, calls))) == calls


@settings(deadline=None)
@given(st.text(_TEXT.filter(lambda char: char != "<")), st.sampled_from(_TAGGED_FORMATS))
def test_any_text_between_tags_comes_through(text, tool_format):
    calls = [(NAME, {"place": text, "days": 1})]
    assert calls_of(answer(tool_format, written(tool_format, calls))) == calls


_FRAGMENTS = sorted(
    {mark for each in TOOL_FORMATS.values() for mark in (*each.marks, each.begin, each.end)}
    | {mark for each in REASONING_FORMATS.values() for mark in (each.begin, each.end, *each.silent)}
    | {NAME, '{"name": "get_weather", "arguments": ', "{}", '{"a": 1}', *"{}[]\"',:=()\\ \n1-"}
    | {"true", "None", "\\u12", "text", "null", "é", "</", "<|"}
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.data(),
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.sampled_from(sorted(REASONING_FORMATS)),
    st.lists(st.sampled_from(_FRAGMENTS), max_size=25).map("".join),
    st.booleans(),
)
def test_whatever_comes_is_read_alike_however_it_is_cut(data, tool_format, reasoning, text, in_reasoning):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(parser(tool_format, reasoning, in_reasoning=in_reasoning), text)
    assert parse(parser(tool_format, reasoning, in_reasoning=in_reasoning), *pieces) == whole
    for call in Answer.of(whole).tool_calls:
        assert not call.complete or isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_deep_nesting_ends_the_call_and_not_the_server(tool_format):
    text = written(tool_format, [(NAME, {"options": 7})]).replace("7", "[" * 5000)
    [call] = answer(tool_format, text).tool_calls
    assert not call.complete or isinstance(json.loads(call.arguments)["options"], str)


# What no format is


@settings(deadline=None)
@given(st.text())
def test_without_formats_text_is_content_as_it_is(text):
    assert answer(None, text).content == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"thought": "…", "name": "f"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f',
        "  a < b  ",
    ],
)
def test_what_is_no_call_is_content(text):
    parsed = answer("hermes", text)
    assert parsed.content == text
    assert not parsed.tool_calls


def test_broken_arguments_are_shown_as_they_are_and_the_next_call_is_read():
    parsed = answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    )
    assert [(call.name, call.arguments, call.complete) for call in parsed.tool_calls] == [
        ("f", '{"a": True}}', False),
        ("g", "{}", True),
    ]
    assert parsed.content == ""


def test_a_brace_too_many_is_no_matter():
    text = '<tool_call>{"name": "f", "arguments": {}}}</tool_call>'
    assert answer("hermes", text).content == ""
    assert calls_of(answer("hermes", text)) == [("f", {})]


def test_arguments_may_come_first_or_be_missing():
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert calls_of(answer("hermes", text)) == [("f", {"a": 1}), ("g", {})]


def test_arguments_may_be_a_string_of_json():
    text = r'<tool_call>{"name": "f", "arguments": "{\"a\": \"b\"}"}</tool_call>'
    assert calls_of(answer("hermes", text)) == [("f", {"a": "b"})]


def test_line_breaks_and_stray_backslashes_in_json_strings_are_mended():
    text = '<tool_call>{"name": "f", "arguments": {"a": "1\n2", "b": "\\d+"}}</tool_call>'
    assert calls_of(answer("hermes", text)) == [("f", {"a": "1\n2", "b": "\\d+"})]


def test_a_missing_closing_mark_matters_only_where_it_shows_the_end():
    assert calls_of(answer("hermes", '<tool_call>{"name": "f", "arguments": {}}')) == [("f", {})]
    [call] = answer("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>").tool_calls
    assert not call.complete


@pytest.mark.parametrize(
    "text", ['{"name": "Ava", "arguments": {}}', "[1, 2]", "[get_time(a=1)]", '{"a": 1}']
)
@pytest.mark.parametrize("tool_format", sorted(UNMARKED))
def test_without_a_mark_only_a_tools_name_makes_a_call(text, tool_format):
    assert answer(tool_format, text) == Answer(content=text)


def test_calls_without_a_mark_are_not_looked_for_after_text():
    text = 'For example: {"name": "get_weather", "parameters": {}}'
    assert answer("llama3_json", text) == Answer(content=text)


def test_types_come_from_the_schema():
    def value(key: str, text: str):
        call = f"<tool_call><function={NAME}><parameter={key}>{text}</parameter></function></tool_call>"
        [(_, arguments)] = calls_of(answer("qwen3_coder", call))
        return arguments[key]

    assert value("place", "7") == "7"
    assert value("days", "7") == 7
    assert value("days", "7.0") == 7
    assert value("days", "many") == "many"
    assert value("ratio", "7") == 7
    assert value("sure", "True") is True
    assert value("note", "null") is None
    assert value("note", "7") == "7"
    assert value("options", "{'a': [True, None]}") == {"a": [True, None]}
    assert value("unknown", "7") == 7
    assert value("unknown", "seven") == "seven"


def test_mistral_writes_calls_in_four_ways():
    expected = [(NAME, {"days": 1})]
    for text in (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"days": 1}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]get_weather[ARGS]{"days": 1}',
        '[TOOL_CALLS]get_weather{"days": 1}',
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"days": 1}',
    ):
        assert calls_of(answer("mistral", text)) == expected


def test_ids_are_what_the_templates_take():
    [start, *_] = parser("mistral").feed(written("mistral", [(NAME, {})]))
    assert len(start.id) == 9
    assert start.id.isalnum()
    [start, *_] = parser("kimi_k2").feed(written("kimi_k2", [(NAME, {})]))
    assert start.id == "functions.get_weather:0"


# Reasoning


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_reasoning_is_told_from_content(name, in_reasoning):
    marks = REASONING_FORMATS[name]
    text = f"{'' if in_reasoning else marks.begin}\nI think <so>.\n{marks.end}\n\nYes, <b>.\n"
    expected = [ReasoningDelta("I think <so>."), ContentDelta("Yes, <b>.\n")]
    for pieces in ([text], text, *((text[:cut], text[cut:]) for cut in range(len(text)))):
        assert parse(parser(reasoning=name, in_reasoning=in_reasoning), *pieces) == expected


def test_a_template_that_opens_the_block_is_seen_in_the_prompt():
    marks = REASONING_FORMATS["qwen3"]
    assert marks.is_open_in("<|im_start|>assistant\n<think>\n")
    assert not marks.is_open_in("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not marks.is_open_in("what is <think>?<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_may_repeat_the_mark_of_the_prompt():
    events = parse(parser(reasoning="qwen3", in_reasoning=True), "<think>\nhm</think>yes")
    assert events == [ReasoningDelta("hm"), ContentDelta("yes")]


def test_reasoning_that_is_cut_stays_reasoning():
    assert answer(None, "<think>I wonder </th", "qwen3") == Answer(reasoning="I wonder </th")


def test_marks_of_reasoning_in_the_midst_of_content_are_text():
    text = "Models write <think> and </think>."
    assert answer(None, text, "qwen3") == Answer(content=text)


def test_an_empty_block_is_nothing():
    assert parse(parser(reasoning="qwen3"), "<think>\n\n</think>\n\nHi") == [ContentDelta("Hi")]


def test_a_call_while_the_model_reasons_is_a_call_if_there_is_such_a_tool():
    parsed = answer(
        "hermes",
        '<think>I could <tool_call>{"name": "other", "arguments": {}}</tool_call> or '
        '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call></think>',
        "qwen3",
    )
    assert calls_of(parsed) == [(NAME, {})]
    assert parsed.reasoning == 'I could <tool_call>{"name": "other", "arguments": {}}</tool_call> or'


def test_channels_of_gpt_oss():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>analysis to=functions.get_weather code<|message|>"
        '{"days": 1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Sunny."
    )
    expected = [
        ReasoningDelta("Hm."),
        ContentDelta("Let me look."),
        ToolCallStart(0, "", NAME), ToolCallArguments(0, "{}"), ToolCallEnd(0, True),
        ReasoningDelta("So."),
        ToolCallStart(1, "", NAME), ToolCallArguments(1, '{"days": 1}'), ToolCallEnd(1, True),
        ContentDelta("Sunny."),
    ]  # fmt: skip
    for pieces in ([text], text, *((text[:cut], text[cut:]) for cut in range(len(text)))):
        assert parse(parser("openai", "gpt_oss"), *pieces) == expected


@pytest.mark.parametrize(
    ("tool_format", "tokens"),
    [
        ("mistral", {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        ("kimi_k2", {"<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"}),
        ("deepseek_v3", {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"}),
        ("openai", {"<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"}),
        ("gemma4", {"<|tool_call>", "<tool_call|>", '<|"|>'}),
        ("hermes", {"<tool_call>", "</tool_call>"}),
    ],
)  # fmt: skip
def test_tokens_that_must_be_seen(tool_format, tokens):
    assert tokens <= TOOL_FORMATS[tool_format].visible_tokens


def test_tokens_of_reasoning_that_must_be_seen():
    assert REASONING_FORMATS["mistral"].visible_tokens == {"[THINK]", "[/THINK]"}
    assert {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"} <= REASONING_FORMATS[
        "gpt_oss"
    ].visible_tokens
