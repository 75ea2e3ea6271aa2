"""Where a request insists on calls, any model writes them, and by the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from in_process import send

import scripted_model
import streamed
from server_process import ServerProcess
from tool_call_writers import TOOL, WRITERS

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(server: ServerProcess, seed: int = 1, **fields: Any) -> Any:
    status, reply = server.post(CHAT, body(seed, **fields))
    assert status == 200, reply
    return reply["choices"]


def body(seed: int = 1, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Once"}]
    return {"messages": messages, "tools": TOOLS, "seed": seed, "temperature": 1, "max_tokens": 1500} | fields


def check(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            jsonschema.validate(arguments, WEATHER)
        else:
            assert (call["function"]["name"], arguments) == ("stop", {})


@pytest.mark.parametrize("seed", range(8))
def test_a_model_that_never_heard_of_tools_calls_them(tiny_server: ServerProcess, seed: int) -> None:
    for choice in ask(tiny_server, seed, tool_choice="required", n=2):
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"]
        check(choice["message"]["tool_calls"])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": NAMED}, {"get_weather"}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"get_weather", "stop"}),
    ],
)
def test_one_call_at_most(tiny_server: ServerProcess, fields: dict[str, Any], names: set[str]) -> None:
    called = set()
    for seed in range(8):
        [choice] = ask(tiny_server, seed, **fields)
        [call] = choice["message"]["tool_calls"]
        check([call])
        called.add(call["function"]["name"])
    assert called == names


def test_a_stream_tells_the_same(tiny_server: ServerProcess) -> None:
    [choice] = ask(tiny_server, tool_choice="required")
    events = streamed.chunks(tiny_server.url, CHAT, body(tool_choice="required"))
    pieces = [
        piece
        for event in events
        for each in event["choices"]
        for piece in each["delta"].get("tool_calls", ())
    ]
    for index, call in enumerate(choice["message"]["tool_calls"]):
        functions = [piece["function"] for piece in pieces if piece["index"] == index]
        assert functions[0]["name"] == call["function"]["name"]
        assert "".join(each["arguments"] for each in functions) == call["function"]["arguments"]


def test_a_call_cut_by_max_tokens(tiny_server: ServerProcess) -> None:
    [choice] = ask(tiny_server, tool_choice=NAMED, max_tokens=50)
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])


def test_a_schema_that_cannot_be_followed_is_refused(tiny_server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    status, reply = tiny_server.post(CHAT, body(tools=[tool], tool_choice="required"))
    assert (status, reply["error"]["param"]) == (400, "tools")
    check(ask(tiny_server, tool_choice="required")[0]["message"]["tool_calls"])


@pytest.mark.parametrize("tool_format", ["pythonic", "gemma4", "lfm2"])
def test_a_format_that_is_only_read_is_written_as_json(tool_format: str) -> None:
    """The model writes its message whatever the grammar says, and fails where that has it otherwise."""
    call = '[{"name": "get_weather", "arguments": {"place":"Rome","days":3}}]'
    with scripted_model.serving(tool_format) as url:
        asked = body(messages=[{"role": "user", "content": call}], tool_choice="required")
        [choice] = send(url, "POST", CHAT, asked).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    check(choice["message"]["tool_calls"])


def test_nor_can_such_calls_stand_beside_a_structure() -> None:
    with scripted_model.serving("pythonic") as url:
        reply = send(url, "POST", CHAT, body(response_format=FORMAT))
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert "can be read but not enforced" in reply.error["message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CALL = WRITERS["hermes"]([("get_weather", {"place": "Rome"})])


@pytest.mark.parametrize(
    ("text", "fields", "answered"),
    [
        ('<think>Hm {</think>\n\n{"a":1}', {"response_format": FORMAT}, True),
        ('{"a":1}', {"response_format": FORMAT}, True),
        ('<think>Hm {</think>\n\n{"b":1}', {"response_format": FORMAT}, False),
        ('Hm {</think>\n\n{"a":1}', {"response_format": FORMAT, "opening": "<think>\n"}, True),
        ('Hm {</think>\n\n{"a":1}', {"response_format": FORMAT, "opening": "<think>\n\n</think>"}, False),
        ('<think>Hm</think>{"a":1}', {"response_format": FORMAT, "opening": "<think>\n\n</think>"}, False),
        (CALL, {"response_format": FORMAT, "tools": [TOOL]}, True),
        ('{"a":1}', {"response_format": FORMAT, "tools": [TOOL]}, True),
        ("Well", {"response_format": FORMAT, "tools": [TOOL]}, False),
        (f"<think>Hm</think>{CALL}", {"tools": [TOOL], "tool_choice": "required"}, True),
        ("<think>Hm</think>No", {"tools": [TOOL], "tool_choice": "required"}, False),
        ('{"a":1}', {"response_format": FORMAT, "tools": [TOOL], "tool_choice": "required"}, False),
    ],
)
def test_reasoning_is_free_and_what_follows_is_not(text: str, fields: dict[str, Any], answered: bool) -> None:
    """The model writes `text` whatever the grammar says, and fails where that has it otherwise."""
    opening = fields.pop("opening", "")
    asked = {
        "messages": [{"role": "user", "content": text}],
        "chat_template_kwargs": {"opening": opening},
        **fields,
    }
    with scripted_model.serving("hermes", "qwen3") as url:
        reply = send(url, "POST", CHAT, asked)
    assert (reply.status == 200) is answered, reply.json


STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}


@pytest.mark.parametrize(
    ("text", "tool", "answered"),
    [
        (f"<think>Hm</think>Well, {CALL} and {CALL}.", STRICT, True),
        ("Hi", STRICT, True),
        ("<tool_call>Hi", STRICT, False),
        (WRITERS["hermes"]([("get_weather", {"place": 1})]), STRICT, False),
        (WRITERS["hermes"]([("get_weather", {"place": 1})]), TOOL, True),
    ],
)
def test_strict_calls_follow_their_schemas(text: str, tool: dict[str, Any], answered: bool) -> None:
    asked = {"messages": [{"role": "user", "content": text}], "tools": [tool]}
    with scripted_model.serving("hermes", "qwen3") as url:
        reply = send(url, "POST", CHAT, asked)
    assert (reply.status == 200) is answered, reply.json


@pytest.mark.parametrize(
    ("text", "fields", "answered"),
    [
        ("<think>Hm</think>Hi <think>again and again</think>", {}, True),
        ("<think>Hm, I</think>Hi", {}, False),
        ("Hi", {}, True),
        ("Hm</think>Hi <tool_call>", {"opening": "<think>"}, True),
        ("Hm, I</think>Hi", {"opening": "<think>"}, False),
        ("Hm, I think", {"opening": "<think></think>"}, True),
        ("<think></think>Hi", {"thinking_token_budget": 0}, True),
        ("<think>H</think>Hi", {"thinking_token_budget": 0}, False),
        ('<think>Hm</think>{"a":1}', {"response_format": FORMAT}, True),
        ('<think>Hm, I</think>{"a":1}', {"response_format": FORMAT}, False),
    ],
)
def test_reasoning_has_no_more_tokens_than_its_budget(
    text: str, fields: dict[str, Any], answered: bool
) -> None:
    """The model writes `text` whatever the grammar says, a token a byte, and fails where that ended it."""
    asked = {
        "messages": [{"role": "user", "content": text}],
        "thinking_token_budget": 4,
        "chat_template_kwargs": {"opening": fields.pop("opening", "")},
        **fields,
    }
    with scripted_model.serving("hermes", "qwen3") as url:
        reply = send(url, "POST", CHAT, asked)
    assert (reply.status == 200) is answered, reply.json


def test_reasoning_that_no_single_token_ends_has_no_budget() -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "thinking_token_budget": 4}
    with scripted_model.serving(None, "granite") as url:
        reply = send(url, "POST", CHAT, asked)
    assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")
