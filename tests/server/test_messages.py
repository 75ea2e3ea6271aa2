"""Anthropic's messages through the real server: streams, whole replies, errors and keys."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from in_process import Reply, ask, send, with_server

import scripted_model
import streamed
from server_process import ServerProcess
from tool_call_writers import TOOL, WRITERS, Call
from vllm_metal.api.sealed_text import unseal

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
NAME = "get_weather"
CALLS: list[Call] = [(NAME, {"place": 'a "b" {c} 日本\n🎉', "days": 3}), (NAME, {})]
ONE_CALL = {"llama3_json", "openai"}  # These models write one.
REASONING = {"openai": ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant")}
HERMES = WRITERS["hermes"]
TOOLS = [
    {
        "name": NAME,
        "description": "x",
        "input_schema": TOOL["function"]["parameters"],
    }
]
THINKING = {"type": "adaptive"}


@pytest.fixture(scope="module")
def hermes() -> Iterator[str]:
    """Of a model that reasons and calls as Qwen3 does."""
    with scripted_model.serving("hermes", "qwen3") as url:
        yield url


def body(text: str, **fields: Any) -> dict[str, Any]:
    """A request to write `text`."""
    messages = [{"role": "user", "content": text}]
    return {"max_tokens": 2000, "messages": messages, "tools": TOOLS, "thinking": THINKING, **fields}


def whole(url: str, text: str, **fields: Any) -> Any:
    reply = send(url, "POST", MESSAGES, body(text, **fields))
    assert reply.status == 200, reply.body
    return reply.json


def events(url: str, asked: dict[str, Any]) -> list[Any]:
    return streamed.named_events(url, MESSAGES, asked)


def amount(told: list[Any]) -> dict[str, Any]:
    """The message that events amount to, by the rules of Anthropic's clients."""
    start, ping, *blocks, delta, stop = told
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message, arguments = dict(start["message"]), ""
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in blocks:
        content = message["content"]
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(content)
                content.append(event["content_block"])
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(content) - 1
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        content[-1]["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        content[-1]["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        content[-1]["signature"] += text
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
                        content[-1]["input"] = None
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert is_open
                is_open = False
                if content[-1].get("input", ()) is None:
                    content[-1]["input"] = json.loads(arguments)
            case other:
                raise AssertionError(other)
    assert not is_open
    assert delta["type"] == "message_delta"
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common."""
    content = [{key: value for key, value in each.items() if key != "id"} for each in message["content"]]
    usage = {key: value for key, value in message["usage"].items() if "input_tokens" not in key}
    return message | {"id": "", "content": content, "usage": usage}


def texts(message: dict[str, Any]) -> list[str]:
    return [each["text"] for each in message["content"] if each["type"] == "text"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_stream_amounts_to_the_whole_in_every_format(name: str) -> None:
    calls = CALLS[:1] if name in ONE_CALL else CALLS
    reasoning, before = REASONING.get(name, ("qwen3", "<think>Hm.</think>"))
    text = before + WRITERS[name](calls)
    with scripted_model.serving(name, reasoning) as url:
        message = whole(url, text)
        told = amount(events(url, body(text)))
    assert without_ids(told) == without_ids(message)
    thinking, *used = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert [(each["name"], each["input"]) for each in used if each["type"] == "tool_use"] == calls
    assert message["stop_reason"] == "tool_use"
    ids = [each["id"] for each in used if each["type"] == "tool_use"]
    assert len(set(ids)) == len(calls)
    assert all(id.startswith("toolu_") for id in ids)


def test_blocks_come_in_the_order_of_the_answer(hermes: str) -> None:
    text = f"<think>Hm.</think>First. {HERMES(CALLS[:1])} Then."
    message = whole(hermes, text)
    assert [each["type"] for each in message["content"]] == ["thinking", "text", "tool_use", "text"]
    assert texts(message) == ["First.", "Then."]


def test_text_alone(hermes: str) -> None:
    message = whole(hermes, "Just text.", tools=[], thinking=None)
    assert message["content"] == [{"type": "text", "text": "Just text.", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert (message["role"], message["model"]) == ("assistant", scripted_model.NAME)


def test_ids_are_the_requests(hermes: str) -> None:
    reply = send(hermes, "POST", f"{MESSAGES}?beta=true", body("A"), {"X-Request-Id": "mine"})
    assert reply.json["id"] == "msg_mine"
    assert reply.headers["Request-Id"] == reply.headers["X-Request-Id"] == "mine"


@pytest.mark.parametrize("formats", [("hermes", "qwen3"), (None, None)], ids=["read", "as-it-is"])
def test_the_stop_sequence_that_was_met_is_told(formats: tuple[str | None, str | None]) -> None:
    asked: dict[str, Any] = {"stop_sequences": ["nowhere", "two", "three"], "tools": []}
    with scripted_model.serving(*formats) as url:
        message = whole(url, "one two three", **asked)
        told = amount(events(url, body("one two three", **asked)))
        assert whole(url, "one", **asked)["stop_reason"] == "end_turn"
    assert texts(message) == texts(told) == ["one "]
    for each in (message, told):
        assert (each["stop_reason"], each["stop_sequence"]) == ("stop_sequence", "two")


def test_an_answer_that_is_cut(hermes: str) -> None:
    message = whole(hermes, "A long text", max_tokens=3)
    assert (message["stop_reason"], texts(message)) == ("max_tokens", ["A l"])
    assert message["usage"]["output_tokens"] == 3
    # Half a call is no object, so there is none to show; a stream shows the half.
    cut = whole(hermes, HERMES(CALLS[:1]), max_tokens=70)
    assert [each["input"] for each in cut["content"]] == [{}]
    assert cut["stop_reason"] == "max_tokens"


def test_reasoning_that_is_not_to_be_shown_is_in_its_signature(hermes: str) -> None:
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    text = "<think>Hm. 日本</think>A"
    message = whole(hermes, text, **omitted)
    told = amount(events(hermes, body(text, **omitted)))
    assert without_ids(told) == without_ids(message)
    thinking, answer = message["content"]
    assert (thinking["thinking"], unseal(thinking["signature"])) == ("", "Hm. 日本")
    assert answer["text"] == "A"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_reasoning_that_was_not_asked_for_is_left_out(hermes: str) -> None:
    for thinking in ({"type": "disabled"}, None):
        message = whole(hermes, "<think>Hm.</think>A", thinking=thinking)
        assert [each["type"] for each in message["content"]] == ["text"]


def test_a_budget_is_no_reason_to_refuse(hermes: str) -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert texts(whole(hermes, "<think>Hm.</think>A", thinking=budget)) == ["A"]
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A"
    # No single token ends the reasoning of this one, so that it cannot be held to any.
    with scripted_model.serving("openai", "gpt_oss") as url:
        assert texts(whole(url, text, thinking=budget)) == ["A"]


def test_one_call_where_no_more_are_wanted(hermes: str) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = whole(hermes, HERMES(CALLS), tool_choice=choice)
    assert [each["input"] for each in message["content"]] == [CALLS[0][1]]
    assert message["stop_reason"] == "tool_use"


def test_calls_are_enforced(tiny_server: ServerProcess) -> None:
    """Of a model that never heard of tools."""
    for choice in ({"type": "any"}, {"type": "tool", "name": NAME}):
        asked = body("Once", tool_choice=choice, temperature=1, max_tokens=1500, thinking=None)
        status, message = tiny_server.post(MESSAGES, asked)
        assert status == 200, message
        assert message["content"]
        assert all(each["type"] == "tool_use" for each in message["content"])


def test_an_answer_goes_on_with_what_the_client_has_begun(hermes: str) -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "It is"}]
    counted = send(hermes, "POST", COUNT, {"messages": messages}).json["input_tokens"]
    # No mark of an answer, which would begin another one.
    assert counted == len("\x01A\x01It is")


def test_counts_are_those_of_the_prompt(hermes: str) -> None:
    asked = body("Count me")
    del asked["max_tokens"]
    counted = send(hermes, "POST", f"{COUNT}?beta=true", asked)
    assert counted.json.keys() == {"input_tokens"}
    usage = whole(hermes, "Count me")["usage"]
    assert counted.json["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_the_next_turn_finds_the_one_before(tiny_server: ServerProcess) -> None:
    """Though the client's first words are another bill each time, and a system message comes in between."""

    def turn(bill: int, *more: dict[str, Any]) -> tuple[Any, int]:
        asked = {
            "max_tokens": 4,
            "temperature": 0,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={bill};"},
                {"type": "text", "text": "Be brief. " * 80, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [{"role": "user", "content": "Once upon"}, *more],
        }
        status, message = tiny_server.post(MESSAGES, asked)
        assert status == 200, message
        told = amount(events(tiny_server.url, asked))
        assert told["usage"]["cache_read_input_tokens"] > 0
        usage = message["usage"]
        status, counted = tiny_server.post(COUNT, {key: asked[key] for key in ("system", "messages")})
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
        return message, usage["cache_read_input_tokens"]

    first, _ = turn(1)
    said = {"role": "assistant", "content": first["content"]}
    _, cached = turn(
        2, said, {"role": "system", "content": "Now in French."}, {"role": "user", "content": "And?"}
    )
    assert cached >= 768


def test_a_prompt_can_be_read_ahead_of_its_use(tiny_server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Once upon a time. " * 60}]
    asked = {"messages": messages, "max_tokens": 0}
    status, message = tiny_server.post(MESSAGES, asked)
    assert (status, message["content"], message["stop_reason"]) == (200, [], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    assert amount(events(tiny_server.url, asked))["usage"]["output_tokens"] == 0
    _, message = tiny_server.post(MESSAGES, asked | {"max_tokens": 1})
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]


def error(reply: Reply) -> tuple[int, str]:
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.json.keys() == {"type", "error", "request_id"}
    assert reply.json["type"] == "error"
    assert reply.json["request_id"] == reply.headers["Request-Id"]
    assert reply.json["error"].keys() == {"type", "message"}
    return reply.status, reply.json["error"]["type"]


HI = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def test_every_error_has_the_shape_of_this_api() -> None:
    def talk(urls: list[str]) -> None:
        def asked(
            method: str, path: str, body: object = None, headers: dict[str, str] | None = None
        ) -> tuple[int, str]:
            return error(
                send(urls[0], method, path, body, {"Authorization": "Bearer key", **(headers or {})})
            )

        wrong = "invalid_request_error"
        assert asked("POST", MESSAGES, {}) == (400, wrong)
        assert asked("POST", MESSAGES, b"{") == (400, wrong)
        assert asked("POST", COUNT, HI | {"top_p": "x"} | {"messages": 1}) == (400, wrong)
        assert asked("POST", MESSAGES, HI, {"Authorization": "Bearer other"}) == (401, "authentication_error")
        assert asked("POST", MESSAGES, HI, {"Host": "evil.example"}) == (403, "permission_error")
        assert asked("POST", MESSAGES, HI | {"model": "other"}) == (404, "not_found_error")
        assert asked("POST", f"{MESSAGES}/batches", {}) == (404, "not_found_error")
        assert asked("GET", MESSAGES) == (405, wrong)
        assert asked("POST", MESSAGES, b" " * 2000) == (413, "request_too_large")
        assert asked("POST", MESSAGES, b"a=1", {"Content-Type": "text/plain"}) == (415, wrong)
        assert asked("POST", MESSAGES, HI, {"Expect": "cookies"}) == (417, wrong)
        # The model that is named is not there to be loaded.
        assert asked("POST", MESSAGES, HI) == (503, "overloaded_error")

    with_server(talk, api_keys=("key",), max_body_bytes=1000)


def test_too_many_requests_are_refused_in_the_shape_of_this_api() -> None:
    def talk(urls: list[str]) -> None:
        first, second = (send(urls[0], "POST", MESSAGES, {}) for _ in range(2))
        assert error(first) == (400, "invalid_request_error")
        assert error(second) == (429, "rate_limit_error")
        assert int(second.headers["Retry-After"]) > 0

    with_server(talk, max_requests_per_minute=1)


def test_what_goes_wrong_in_a_stream_is_its_last_event() -> None:
    told_all = threading.Event()

    def hesitate(shown: str) -> str:
        told_all.wait(60)
        return shown

    with scripted_model.serving(None, script=hesitate, request_timeout=0.05) as url:
        [told] = events(url, HI)
        whole = send(url, "POST", MESSAGES, HI)
        told_all.set()
    assert error(whole) == (408, "timeout_error")
    assert whole.headers["x-should-retry"] == "false"
    assert told["error"] == whole.json["error"]
    assert told.keys() == whole.json.keys()


def test_other_routes_keep_the_shape_of_theirs() -> None:
    for path in ("/v1/messagesome", "/v1/chat/completions"):
        reply = ask("POST", path, {})
        assert reply.error
        assert "Request-Id" not in reply.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer key"},
        {"X-Api-Key": "key"},
        {"Authorization": "Bearer key", "X-Api-Key": "of Anthropic"},
    ],
)
def test_keys_come_as_any_client_sends_them(headers: dict[str, str]) -> None:
    beta = {"anthropic-version": "2023-06-01", "anthropic-beta": "unheard-of-2027-01-01"}
    assert ask("POST", MESSAGES, {}, headers | beta, api_keys=("key",)).status == 400
    assert ask("GET", "/v1/models", headers=headers, api_keys=("key",)).status == 200


def test_what_is_wrong_is_called_as_in_this_api(hermes: str) -> None:
    """Though it is the chat in which it is wrong."""

    def asked(url: str, schema: dict[str, Any]) -> str:
        form = {"type": "json_schema", "schema": schema}
        reply = send(url, "POST", MESSAGES, body("A", output_config={"format": form}))
        assert error(reply) == (400, "invalid_request_error")
        return str(reply.json["error"]["message"])

    told = asked(hermes, {"type": "banana"})
    assert told.startswith("`output_config.format` cannot be followed")
    with scripted_model.serving("pythonic") as url:
        told = asked(url, {"type": "object"})
    assert told.endswith("leave `output_config.format` out, or have `tool_choice` be `any`")


def test_a_prompt_that_is_too_long(hermes: str) -> None:
    """Anthropic's clients know it by the words."""
    reply = send(hermes, "POST", MESSAGES, body("x" * 5000))
    assert error(reply) == (400, "invalid_request_error")
    assert reply.json["error"]["message"].startswith("prompt is too long: 5")
    assert reply.json["error"]["message"].endswith(" tokens > 4096 maximum")
