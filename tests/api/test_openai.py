"""Request rules, one row of the tables at a time, and what cannot crash the decoder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.api.chat import REASONING_KEYS, ChatCompletionRequest
from vllm_metal.api.completions import CompletionRequest
from vllm_metal.api.decoding import decode
from vllm_metal.api.generation import GenerationRequest
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "hi"}]
REQUEST_TYPES = (ChatCompletionRequest, CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def decode_as(request_type: type[GenerationRequest], **fields: Any) -> GenerationRequest:
    return chat(**fields) if request_type is ChatCompletionRequest else completion(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": 2**64 + 1}, {"seed": 2**64 + 1}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 2.0, "top_k": 4.0, "seed": -1.0}, {"max_tokens": 2, "top_k": 4, "seed": -1}),
        ({"temperature": 2.0}, {"temperature": 2.0}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a"] * 16}, {"stop": ("a",) * 16}),
        ({"stop": []}, {}),
        ({"stop_token_ids": [3, 4]}, {"stop_token_ids": (3, 4)}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
        ({"priority": -3}, {"priority": -3}),
        ({"cache_salt": "mine"}, {"cache_salt": "mine"}),
        ({"skip_reading_prefix_cache": True}, {"skip_reading_prefix_cache": True}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2, "frequency_penalty": 2}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {"7": -100, "0": 0.5}}, {"logit_bias": ((7, -100.0), (0, 0.5))}),
        ({"logit_bias": {}, "bad_words": []}, {}),
        ({"min_tokens": 1}, {"min_tokens": 1}),
        ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": (5, 6)}),
        ({"temperature": None, "stop": None, "seed": None, "n": None, "tools": None}, {}),
    ],
)
@pytest.mark.parametrize("request_type", REQUEST_TYPES)
def test_sampling_fields_are_honoured(
    request_type: type[GenerationRequest], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    fields = {"max_tokens": 1, **fields}
    expected = {"max_tokens": 1, **expected}
    assert SamplingParams(**decode_as(request_type, **fields).sampling()) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ""}, "`stop` must be a non-empty string or a list of them"),
        ({"top_p": 2}, "`top_p` must be at most 1"),
        ({"top_k": -(10**399)}, "`top_k` must be at least -1"),
        ({"min_p": 1.1}, "`min_p` must be at most 1"),
        ({"presence_penalty": 2.1}, "`presence_penalty` must be at most 2"),
        ({"frequency_penalty": -2.1}, "`frequency_penalty` must be at least -2"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be above 0"),
        ({"best_of": 2}, "`best_of` may only equal `n`"),
        ({"truncate_prompt_tokens": 0}, "`truncate_prompt_tokens` must be at least 1, or -1"),
        ({"max_tokens": 0}, "`max_tokens` must be at least 1 without `echo`"),
        ({"min_tokens": -1}, "`min_tokens` must be at least 0"),
        ({"min_tokens": 17}, "`min_tokens` must be at most `max_tokens`, which is 16, got 17"),
        (
            {"min_tokens": 10**99},
            f"`min_tokens` must be at most `max_tokens`, which is 16, got 1{79 * '0'}…",
        ),
        ({"allowed_token_ids": []}, "`allowed_token_ids` must name at least one"),
        ({"logit_bias": {"1": 101}}, "`logit_bias` must be at most 100"),
        ({"logit_bias": {"the": 1}}, "the keys of `logit_bias` must be token ids"),
        ({"logit_bias": {"-1": 1}}, "the keys of `logit_bias` must be token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "the keys of `logit_bias` must be token ids"),
    ],
)
def test_values_out_of_range_are_shown_in_short(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**completion(**fields).sampling())
    assert caught.value.message == message
    assert [caught.value.param] == list(fields)


def test_logprobs_of_a_chat_and_of_a_completion() -> None:
    assert "logprobs" not in chat().sampling() | chat(logprobs=False, top_logprobs=0).sampling()
    assert chat(logprobs=True).sampling()["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=20).sampling()["logprobs"] == 20
    assert "logprobs" not in completion().sampling()
    assert completion(logprobs=0).sampling()["logprobs"] == 0
    with pytest.raises(InvalidRequest) as caught:
        chat(top_logprobs=2).sampling()
    assert caught.value.param == "top_logprobs"


def test_an_echo_tells_the_prompts_logprobs_too() -> None:
    assert "prompt_logprobs" not in completion(echo=True).sampling() | completion(logprobs=2).sampling()
    assert completion(echo=True, logprobs=2).sampling()["prompt_logprobs"] == 2
    assert completion(echo=True, logprobs=1, prompt_logprobs=3).sampling()["prompt_logprobs"] == 3
    assert completion(echo=True, max_tokens=0).sampling()["max_tokens"] == 0


@pytest.mark.parametrize("request_type", REQUEST_TYPES)
def test_prompt_logprobs_are_not_streamed(request_type: type[GenerationRequest]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_as(request_type, prompt_logprobs=0, stream=True).sampling()
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("request_type", REQUEST_TYPES)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", (0, -1, 129, True, "2", 1.5)),
        ("best_of", (True, "1", [])),
        ("include_stop_str_in_output", (0, 1, "true")),
        ("skip_special_tokens", (0, 1, "true")),
        ("prompt_logprobs", (-1, 21, True, "1")),
        ("truncate_prompt_tokens", (-2, True, "1", 1.5)),
        ("return_token_ids", (0, 1, "true")),
        ("return_tokens_as_token_ids", (0, 1, "true")),
        ("seed", (True, "1", 1.5)),
    ],
)
def test_values_of_another_kind_are_refused(
    request_type: type[GenerationRequest], name: str, values: tuple[object, ...]
) -> None:
    assert decode_as(request_type, **{name: None}) == decode_as(request_type)
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            decode_as(request_type, **{name: value})
        assert caught.value.param == name


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).sampling()["max_tokens"] == 9


def test_a_chat_may_fill_the_context_and_a_completion_has_openais_default() -> None:
    assert "max_tokens" not in chat().sampling()
    assert completion(max_tokens=None).sampling()["max_tokens"] == 16


@pytest.mark.parametrize(
    ("request_type", "name", "value"),
    [
        (request_type, name, value)
        for request_type in REQUEST_TYPES
        for name, values in request_type.unsupported.items()
        for value in (*values, None)
    ],
)
def test_a_neutral_value_passes(request_type: type[GenerationRequest], name: str, value: object) -> None:
    assert decode_as(request_type, **{name: value}) == decode_as(request_type)


@pytest.mark.parametrize(
    ("request_type", "name"),
    [(request_type, name) for request_type in REQUEST_TYPES for name in request_type.unsupported],
)
@pytest.mark.parametrize("value", [0.5, 2, "x", ["x"], {"x": 1}])
def test_any_other_value_is_refused(request_type: type[GenerationRequest], name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_as(request_type, **{name: value})
    successor = request_type.successors.get(name)
    rest = f"; `{successor}` has replaced it" if successor else " yet"
    assert caught.value.message == f"`{name}` is not supported{rest}"
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", True),
        ("echo", 0),
    ],
)
def test_a_look_alike_of_a_neutral_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [True, "x", {"a": [1]}, []])
@pytest.mark.parametrize("name", [*sorted(GenerationRequest.without_effect), "nobody_knows_this"])
def test_fields_without_effect_may_hold_anything(name: str, value: object) -> None:
    assert chat(**{name: value}) == chat()


def test_no_field_is_in_two_tables() -> None:
    for request_type in REQUEST_TYPES:
        honoured = set(request_type.__struct_fields__)
        assert not honoured & request_type.unsupported.keys()
        assert not honoured & request_type.without_effect
        assert not request_type.unsupported.keys() & request_type.without_effect


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": 3}, "model", "`model`: expected `str | null`, got `int`"),
        ({"temperature": True}, "temperature", "`temperature`: expected `float | null`, got `bool`"),
        ({"temperature": "hot"}, "temperature", "`temperature`: expected `float | null`, got `str`"),
        ({"stream": 1}, "stream", "`stream`: expected `bool`, got `int`"),
        ({"top_k": 1.5}, "top_k", "`top_k`: expected `int | null`, got `float`"),
        ({"seed": 1e300}, "seed", "`seed`: expected `int | null`, got `float`"),
        ({"stop": ["a"] * 17}, "stop", "`stop`: expected `array` of length <= 16"),
        ({"stop": ["a", 1]}, "stop[1]", "`stop[1]`: expected `str`, got `int`"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", None),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", None),
        ({"max_completion_tokens": 0}, "max_completion_tokens", None),
        ({"presence_penalty": False}, "presence_penalty", None),
        ({"logit_bias": {"1": "x"}}, "logit_bias", None),
        ({"logit_bias": [1]}, "logit_bias", None),
        ({"bad_words": ["a", ""]}, "bad_words[1]", None),
        ({"bad_words": ["a" * 1025]}, "bad_words[0]", None),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]", None),
        ({"logprobs": 2}, "logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"messages": None}, "messages", "`messages` is required"),
        ({"messages": []}, "messages", None),
        ({"messages": 16_385 * MESSAGES}, "messages", None),
        ({"documents": 1025 * [{}]}, "documents", None),
        ({"bad_words": 1025 * ["a"]}, "bad_words", None),
        ({"stop_token_ids": 1025 * [1]}, "stop_token_ids", None),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", None),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "`messages[0].role` is required"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", None),
        ({"messages": [*MESSAGES, {"role": "user", "content": 7}]}, "messages[1].content", None),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", None),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", None),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, message: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    if message is not None:
        assert caught.value.message == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"messages": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"temperature": ' + b"9" * 400 + b', "messages": [{"role": "user", "content": "x"}]}',
        b'{"a": "\xff\xfe"}',
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, ChatCompletionRequest)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": [' + b",".join([b'{"type": "text"}'] * 350_000) + b"]}]}",
        b'{"nobody knows": [' + b",".join([b"[]"] * (1 << 20)) + b"]}",
        b'{"metadata": ' + b"[" * (1 << 21),
        b'{"' + b'\\"' * (1 << 22) + b"[" * (1 << 20) + b'": ["' + b'a","' * (1 << 20),
    ],
)
def test_a_body_of_too_many_parts_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than 1048576 strings, lists and objects"):
        decode(body, ChatCompletionRequest)


@pytest.mark.parametrize("text", ["[{" * (1 << 20), '"' * (1 << 21), "\\" * (1 << 20) + '"{' * (1 << 20)])
def test_a_text_of_many_parts_is_one(text: str) -> None:
    assert chat(messages=[{"role": "user", "content": text}]).messages[0].text == text


def test_a_string_without_end_is_looked_at_once() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        decode(b'{"a": "' + b'\\"' * (1 << 22), ChatCompletionRequest)


def test_a_wrong_word_comes_with_where_the_right_ones_are() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "function", "content": "x"}])
    assert caught.value.hint is not None
    assert "/openapi.json" in caught.value.hint


@pytest.mark.parametrize("body", [b'{"a": "\\ud800"}', b'{"a": "\\uDC00bc"}', b'{"\\ud83dx": 1}'])
def test_half_a_surrogate_pair_is_told_of(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, ChatCompletionRequest)
    assert caught.value.hint is not None
    assert "in pairs" in caught.value.hint


def test_messages_reach_the_template_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
            {"role": "assistant", "reasoning_content": "hm"},
            {"role": "assistant"},
        ]
    )
    assert request.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "", **dict.fromkeys(REASONING_KEYS, "hm")},
        {"role": "assistant", "content": ""},
    ]


def test_arguments_that_are_not_json_reach_the_template_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "{oops"}}
    request = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    [message] = request.template_messages()
    assert message["tool_calls"][0]["function"]["arguments"] == "{oops"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "tool"}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "messages[0].content[1].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
    ],
)
def test_content_that_is_not_text_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[message]).template_messages()
    assert caught.value.param == param


def test_template_kwargs_are_the_clients_but_for_the_servers_own() -> None:
    request = chat(
        chat_template_kwargs={"enable_thinking": False, "nothing": None},
        reasoning_effort="low",
        documents=[{"title": "t", "text": "x"}],
        chat_template="{{ 1 }}",
    )
    assert request.template_kwargs() == {
        "enable_thinking": False,
        "nothing": None,
        "reasoning_effort": "low",
        "documents": [{"title": "t", "text": "x"}],
        "chat_template": "{{ 1 }}",
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True)),
    ],
)
def test_an_answer_begins_a_message_or_goes_on_with_one(
    fields: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    asked = chat(**fields).template_kwargs()
    assert (asked["add_generation_prompt"], asked["continue_final_message"]) == expected


def test_an_answer_cannot_do_both() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(continue_final_message=True, add_generation_prompt=True).template_kwargs()
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("template", ["", "x" * 65_537])
def test_a_chat_template_is_bounded(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(chat_template=template)
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize("name", ["chat_template", "messages", "sanitize_control_tokens", "tools", "self"])
def test_the_servers_own_template_kwargs_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(chat_template_kwargs={name: "x"}).template_kwargs()
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b", "a"], ["a", "b", "a"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
        ("", [""]),
        ([], [[]]),
    ],
)
def test_prompts_in_any_form(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [["a", 1], [1, "a"], [[1], 2]])
def test_token_ids_beside_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt).prompts()
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[True], 3, {"a": 1}, [1.5], [[[1]]]])
def test_a_prompt_of_another_kind_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | JSON,
        "content": st.text()
        | st.lists(st.fixed_dictionaries({}, optional={"type": JSON, "text": JSON}))
        | JSON,
        "tool_calls": st.lists(st.fixed_dictionaries({}, optional={"function": JSON, "id": JSON})) | JSON,
    },
)


KNOWN_FIELDS = sorted(
    {*ChatCompletionRequest.__struct_fields__, *ChatCompletionRequest.unsupported} - {"messages"}
)


def understand(fields: object) -> None:
    body = json.dumps(fields).encode()
    for request_type in REQUEST_TYPES:
        try:
            request = decode(body, request_type)
            SamplingParams(**request.sampling())
            if isinstance(request, ChatCompletionRequest):
                request.template_messages()
                request.template_kwargs()
            else:
                assert isinstance(request, CompletionRequest)
                request.prompts()
        except InvalidRequest:
            continue


@given(JSON)
def test_any_json_is_understood_or_refused(value: object) -> None:
    understand(value)


@given(
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE, max_size=2) | JSON, "prompt": JSON},
        optional=dict.fromkeys(KNOWN_FIELDS, JSON),
    )
)
def test_any_values_of_known_fields_are_understood_or_refused(fields: dict[str, object]) -> None:
    understand(fields)
