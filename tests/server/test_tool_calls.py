"""Tool calls and reasoning through the real server: streams, whole replies and OpenAI's own client agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from in_process import send

import scripted_model
import streamed
from tool_call_writers import TOOL, WRITERS, Call

NAME = "get_weather"
CALLS: list[Call] = [(NAME, {"place": 'a "b" {c} 日本\n🎉', "days": 3}), (NAME, {})]
ONE_CALL = {"llama3_json", "openai"}  # These models write one.
REASONING = {"openai": ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant")}
HERMES = WRITERS["hermes"]


@pytest.fixture(scope="module")
def hermes() -> Iterator[str]:
    """Of a model that reasons and calls as Qwen3 does."""
    with scripted_model.serving("hermes", "qwen3") as url:
        yield url


@pytest.fixture
def client(hermes: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes}/v1", api_key="none", max_retries=0) as client:
        yield client


def body(text: str, **fields: Any) -> dict[str, Any]:
    """A request to write `text`."""
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], "tools": [TOOL], **fields}


def whole(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(**body(text, **fields)).choices[0]


def calls_of(message: Any) -> list[Call]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def amount(events: list[Any]) -> dict[str, Any]:
    """The message that deltas amount to, by the rules of OpenAI's clients."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                message[key] += delta.get(key, "")
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    assert piece.keys() == {"index", "id", "type", "function"}
                    assert piece["function"]["arguments"] == ""
                    message["tool_calls"].append({**piece, "function": dict(piece["function"])})
                else:
                    assert piece.keys() == {"index", "function"}
                    assert piece["function"].keys() == {"arguments"}
                    message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"][
                        "arguments"
                    ]
    return message


@pytest.mark.parametrize("name", WRITERS)
def test_a_stream_amounts_to_the_whole_in_every_format(name: str) -> None:
    calls = CALLS[:1] if name in ONE_CALL else CALLS
    reasoning, before = REASONING.get(name, ("qwen3", "<think>Hm.</think>"))
    text = before + WRITERS[name](calls)
    with (
        scripted_model.serving(name, reasoning) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        choice = whole(client, text)
        events = streamed.chunks(url, "/v1/chat/completions", body(text))
    assert calls_of(choice.message) == calls
    assert (choice.message.content, choice.message.reasoning) == (None, "Hm.")
    message = amount(events)
    assert message["reasoning"] == message["reasoning_content"] == choice.message.reasoning_content
    assert message["content"] == ""
    assert [each["function"] for each in message["tool_calls"]] == [
        call.function.to_dict() for call in choice.message.tool_calls
    ]
    assert choice.finish_reason == events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_from_question_to_call_to_answer(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Let me see.\n{HERMES(CALLS[:1])}"}]
    ask = {"model": "scripted", "tools": [TOOL]}
    asked = client.chat.completions.create(messages=messages, **ask).choices[0]
    assert asked.message.content == "Let me see."
    [call] = asked.message.tool_calls
    messages += [
        asked.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."},
    ]
    told = client.chat.completions.create(messages=messages, **ask).choices[0]
    assert (told.message.content, told.message.tool_calls, told.finish_reason) == (
        "It is sunny.",
        None,
        "stop",
    )


def test_the_client_accumulates_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **body(f"<think>Hm.</think>{HERMES(CALLS)}", stream_options={"include_usage": True})
    ) as stream:
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert calls_of(completion.choices[0].message) == CALLS
    assert completion.choices[0].finish_reason == "tool_calls"
    ids = [call.id for call in completion.choices[0].message.tool_calls]
    assert len(set(ids)) == 2


def test_tools_reach_the_template_unless_none_may_be_called(client: openai.OpenAI, hermes: str) -> None:
    def num_prompt_tokens(**fields: Any) -> int:
        return client.chat.completions.create(**body("Hi", **fields)).usage.prompt_tokens

    assert num_prompt_tokens() > num_prompt_tokens(tool_choice="none") == num_prompt_tokens(tools=[])


def test_a_call_that_none_asked_for_is_text(client: openai.OpenAI) -> None:
    text = HERMES(CALLS[:1])
    for fields in ({"tool_choice": "none"}, {"tools": []}):
        choice = whole(client, text, **fields, extra_body={"skip_special_tokens": False})
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_answer_ends_behind_the_first(hermes: str, stream: bool) -> None:
    text = HERMES(CALLS) + "more" * 200
    asked = body(text, parallel_tool_calls=False, n=2)
    with openai.OpenAI(base_url=f"{hermes}/v1", api_key="none", max_retries=0) as client:
        if stream:
            with client.chat.completions.stream(**asked) as events:
                completion = events.get_final_completion()
        else:
            completion = client.chat.completions.create(**asked)
    for choice in completion.choices:
        assert calls_of(choice.message) == CALLS[:1]
        assert (choice.message.content or "", choice.finish_reason) == ("", "tool_calls")
    if not stream:
        assert completion.usage.completion_tokens < 2 * len(text.encode())


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_cut_short_is_told_as_far_as_it_came(
    client: openai.OpenAI, hermes: str, parallel: bool
) -> None:
    text = HERMES(CALLS[:1])
    choice = whole(client, text, max_tokens=60, parallel_tool_calls=parallel)
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls
    assert call.function.name == NAME
    assert call.function.arguments == '{"place": "a \\"b\\" {c'
    events = streamed.chunks(hermes, "/v1/chat/completions", body(text, max_tokens=60))
    [streamed_call] = amount(events)["tool_calls"]
    assert streamed_call["function"] == call.function.to_dict()
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\nnothing\n</tool_call>", "<tool_call>", '<tool_call>{"a": 1}</tool_call>', "</think>"],
)
def test_what_is_no_call_is_text(client: openai.OpenAI, text: str) -> None:
    choice = whole(client, text)
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert choice.finish_reason == "stop"


def test_reasoning_is_left_out_on_request(client: openai.OpenAI) -> None:
    message = whole(client, "<think>Hm.</think>Hi", extra_body={"include_reasoning": False}).message
    assert message.to_dict() == {"role": "assistant", "content": "Hi", "refusal": None}


@pytest.mark.parametrize(
    ("text", "opening", "expected"),
    [("<think>Hm.</think>Hi", "", 5), ("Hm.</think>Hi", "<think>", 4), ("Hi", "", 0), ("Hm.", "<think>", 4)],
)
def test_tokens_of_reasoning_are_counted(
    client: openai.OpenAI, text: str, opening: str, expected: int
) -> None:
    fields = {"n": 2, "extra_body": {"chat_template_kwargs": {"opening": opening}}}
    usage = client.chat.completions.create(**body(text, **fields)).usage
    assert usage.completion_tokens_details.reasoning_tokens == 2 * expected
    asked = body(text, **fields, stream=True, stream_options={"include_usage": True})
    [*_, last] = client.chat.completions.create(**asked)
    assert last.usage.completion_tokens_details == usage.completion_tokens_details


def test_reasoning_that_the_template_began(client: openai.OpenAI) -> None:
    fields = {"extra_body": {"chat_template_kwargs": {"opening": "<think>\n"}}}
    message = whole(client, "Hm.\n</think>\n\nHi", **fields).message
    assert (message.reasoning, message.content) == ("Hm.", "Hi")


@pytest.mark.parametrize(
    ("begun", "reasoning"), [("a <think> b", True), ("a <think> b </think> c", False), ("a", False)]
)
def test_going_on_with_a_message(client: openai.OpenAI, begun: str, reasoning: bool) -> None:
    """The model repeats what it goes on with; only a beginning may begin reasoning."""
    messages: list[Any] = [{"role": "assistant", "content": begun}]
    message = (
        client.chat.completions.create(
            model="scripted", messages=messages, extra_body={"continue_final_message": True}
        )
        .choices[0]
        .message
    )
    told = {key: value for key, value in message.to_dict().items() if value and key != "role"}
    if reasoning:
        assert told == {"reasoning": begun, "reasoning_content": begun}
    else:
        assert told == {"content": begun}


def test_stop_strings_are_looked_for_in_content_alone(client: openai.OpenAI, hermes: str) -> None:
    call: Call = (NAME, {"place": "stop"})
    text = f"<think>stop</think>on {HERMES([call])}go st. {'stop now ' * 300}"
    choice = whole(client, text, stop="stop", max_tokens=2000)
    assert (choice.message.reasoning, choice.message.content) == ("stop", "ongo st. ")
    assert (calls_of(choice.message), choice.finish_reason) == ([call], "tool_calls")
    events = streamed.chunks(hermes, "/v1/chat/completions", body(text, stop="stop", max_tokens=2000))
    message = amount(events)
    assert (message["reasoning"], message["content"]) == ("stop", "ongo st. ")
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_stop_string_half_written_is_told_before_what_follows_it(client: openai.OpenAI) -> None:
    choice = whole(client, f"a sto{HERMES(CALLS)}p sto", stop="stop")
    assert choice.message.content == "a stop sto"


def test_every_token_has_its_log_probability(client: openai.OpenAI, hermes: str) -> None:
    text = f"<think>Hm.</think>Hi {HERMES(CALLS)}"
    completion = client.chat.completions.create(**body(text, logprobs=True))
    tokens = completion.choices[0].logprobs.content
    assert len(tokens) == completion.usage.completion_tokens
    events = streamed.chunks(hermes, "/v1/chat/completions", body(text, logprobs=True))
    [choice] = streamed.joined(events)
    assert [each["token"] for each in choice["logprobs"]] == [each.token for each in tokens]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{**TOOL, "function": {"name": "f", "description": "x" * (1 << 20)}}]}, "tools"),
    ],
)
def test_tools_that_cannot_be_are_refused(hermes: str, fields: dict[str, Any], param: str) -> None:
    reply = send(hermes, "POST", "/v1/chat/completions", body("Hi", **fields))
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_model_that_calls_no_tools_says_so() -> None:
    with scripted_model.serving(None) as url:
        reply = send(url, "POST", "/v1/chat/completions", body("Hi"))
        assert reply.status == 400
        assert reply.error["message"].startswith("this model cannot call tools: the test says so; ")
        assert send(url, "POST", "/v1/chat/completions", body("Hi", tool_choice="none")).status == 200
