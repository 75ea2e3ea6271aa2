"""OpenAI's responses through the real server, by OpenAI's client: whole, streamed, kept and gone on with."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from in_process import send
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

import scripted_model
from server_process import ServerProcess
from tool_call_writers import TOOL, WRITERS, Call

HERMES = WRITERS["hermes"]
WEATHER = {"type": "function", **TOOL["function"]}
HI = {"role": "user", "content": "Hi"}
CALLS: list[Call] = [("get_weather", {"place": 'a "b" 日本🎉'}), ("get_weather", {})]
EVERYTHING = f"<think>Hm.</think>Let me see. {HERMES(CALLS)}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a model that reasons and calls as Qwen3 does, and says what the last message does."""
    with scripted_model.serving("hermes", "qwen3") as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def checked(answer: Any, kind: Any) -> Any:
    """The answer, held strictly to the SDK's own types, which the SDK itself does not do."""
    TypeAdapter(kind).validate_python(answer.to_dict(mode="json", exclude_unset=True), strict=True)
    return answer


def whole(client: openai.OpenAI, input: Any, **fields: Any) -> Response:
    return checked(client.responses.create(model="scripted", input=input, **fields), Response)


def streamed(client: openai.OpenAI, input: Any, **fields: Any) -> list[Any]:
    stream = client.responses.create(model="scripted", input=input, stream=True, **fields)
    return [checked(event, ResponseStreamEvent) for event in stream]


def told(response: Response) -> list[dict[str, Any]]:
    """The items, without what differs from one response to the next."""
    items: list[dict[str, Any]] = [item.to_dict() for item in response.output]
    for item in items:
        for name in ("id", "call_id"):
            item.pop(name, None)
    return items


def built(events: list[Any]) -> list[dict[str, Any]]:
    """The items that a client builds from the pieces alone, held to what is told of them in the end."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                items.append(event.item.to_dict())
            case "response.content_part.added":
                assert event.content_index == len(items[event.output_index]["content"])
                items[event.output_index]["content"].append(event.part.to_dict())
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = items[event.output_index]["content"][event.content_index]
                part["text"] += event.delta
                part.get("logprobs", []).extend(each.to_dict() for each in getattr(event, "logprobs", []))
            case "response.function_call_arguments.delta":
                items[event.output_index]["arguments"] += event.delta
            case "response.custom_tool_call_input.delta":
                items[event.output_index]["input"] += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == items[event.output_index]["content"][event.content_index]["text"]
            case "response.content_part.done":
                assert event.part.to_dict() == items[event.output_index]["content"][event.content_index]
            case "response.function_call_arguments.done":
                assert event.arguments == items[event.output_index]["arguments"]
            case "response.output_item.done":
                items[event.output_index]["status"] = event.item.status
                items[event.output_index] |= {
                    name: value for name, value in event.item.to_dict().items() if name == "encrypted_content"
                }
                assert event.item.to_dict() == items[event.output_index]
            case _:
                continue
        if event.type.startswith(("response.content", "response.output_text", "response.function")):
            assert event.item_id == items[event.output_index]["id"]
    return items


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello, 日本🎉!", {}),
        ("", {}),
        (EVERYTHING, {}),
        (EVERYTHING, {"include": ["reasoning.encrypted_content"]}),
        ("<think>Hm.</think>Hi", {"include": ["message.output_text.logprobs"]}),
        (EVERYTHING, {"max_output_tokens": 80}),
        (EVERYTHING, {"max_output_tokens": 8}),
        (EVERYTHING, {"parallel_tool_calls": False}),
        ("<think>Hm.", {}),
    ],
)
def test_a_stream_amounts_to_the_whole(client: openai.OpenAI, text: str, fields: dict[str, Any]) -> None:
    response = whole(client, text, tools=[WEATHER], **fields)
    events = streamed(client, text, tools=[WEATHER], **fields)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    created, in_progress, *_, last = events
    assert (created.type, in_progress.type) == ("response.created", "response.in_progress")
    assert (created.response.status, created.response.output) == ("in_progress", [])
    assert last.type == f"response.{response.status}"
    assert told(last.response) == told(response)
    assert built(events) == [item.to_dict() for item in last.response.output]
    assert last.response.usage.input_tokens == response.usage.input_tokens
    assert {event.response.id for event in (created, in_progress, last)} == {last.response.id}


def test_the_kinds_of_items(client: openai.OpenAI) -> None:
    response = whole(client, EVERYTHING, tools=[WEATHER])
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text == "Hm."
    assert (message.content[0].text, response.output_text) == ("Let me see.", "Let me see.")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert {item.status for item in response.output} == {"completed"}
    assert response.usage.output_tokens_details.reasoning_tokens == 5
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_events_have_names_and_nothing_follows_the_last(url: str) -> None:
    reply = send(url, "POST", "/v1/responses", {"input": "Hi", "stream": True})
    *events, end = reply.body.decode().split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert name == "event: response.completed"


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input=EVERYTHING, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
    assert response.output_text == "Let me see."


def test_what_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    response = whole(client, "Hello", max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "Hel")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.output[0].status, response.completed_at) == ("incomplete", None)


class Extracted(BaseModel):
    name: str
    age: int


def test_structure(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="scripted", input='{"name":"Ava","age":25}', text_format=Extracted)
    assert parsed.output_parsed == Extracted(name="Ava", age=25)
    echoed = parsed.text.format
    assert (echoed.type, echoed.name) == ("json_schema", "Extracted")
    response = whole(client, '{"a":1}', text={"format": {"type": "json_object"}})
    assert json.loads(response.output_text) == {"a": 1}
    # As the SDK's models are dumped.
    dumped = {"type": "json_schema", "name": "n", "description": None, "strict": None, "schema": {}}
    assert json.loads(whole(client, '{"a":1}', text={"format": dumped}).output_text) == {"a": 1}


def test_log_probabilities_are_of_text_alone(client: openai.OpenAI) -> None:
    response = whole(client, "<think>Hm.</think>Hé", include=["message.output_text.logprobs"])
    logprobs = response.output[1].content[0].logprobs
    assert bytes(byte for each in logprobs for byte in each.bytes).decode() == "Hé"
    for _ in range(5):  # However fast it is read.
        [part] = whole(client, EVERYTHING, tools=[WEATHER], top_logprobs=2).output[1].content
        assert "".join(each.token for each in part.logprobs) == part.text == "Let me see."
    assert whole(client, "Hé", top_logprobs=2).output[0].content[0].logprobs
    assert not whole(client, "Hé").output[0].content[0].logprobs


# Conversations.


def test_a_tool_loop_by_items(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": EVERYTHING}]
    asked = whole(client, items, tools=[WEATHER], store=False)
    items += [item.to_dict() for item in asked.output]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"Sunny {i}."}
        for i, item in enumerate(asked.output)
        if item.type == "function_call"
    ]
    assert whole(client, items, tools=[WEATHER], store=False).output_text == "Sunny 3."


def test_a_tool_loop_by_what_is_kept(client: openai.OpenAI) -> None:
    asked = whole(client, EVERYTHING, tools=[WEATHER])
    call_id = asked.output[-1].call_id
    output = {
        "type": "function_call_output",
        "call_id": call_id,
        "output": [{"type": "input_text", "text": "Sun"}],
    }
    answered = whole(client, [output], tools=[WEATHER], previous_response_id=asked.id)
    assert (answered.output_text, answered.previous_response_id) == ("Sun", asked.id)
    kept = checked(client.responses.retrieve(answered.id), Response)
    assert kept.to_dict() == answered.to_dict()
    page = client.responses.input_items.list(answered.id, order="asc", limit=4)
    first = checked(ResponseItemList(**page.to_dict()), ResponseItemList)
    assert [item.type for item in first.data] == ["message", "reasoning", "message", "function_call"]
    assert page.has_more
    listed = list(client.responses.input_items.list(answered.id, order="asc", limit=4))
    assert [item.type for item in listed[4:]] == ["function_call", "function_call_output"]
    assert [item.id for item in client.responses.input_items.list(answered.id)] == [
        item.id for item in reversed(listed)
    ]


def test_previous_items_come_first_and_instructions_are_not_carried_over(client: openai.OpenAI) -> None:
    first = whole(client, "One", instructions="Be brief.")
    assert first.instructions == "Be brief."
    alone = whole(client, "Two").usage.input_tokens
    second = whole(client, "Two", previous_response_id=first.id)
    # A byte is a token, and a message begins with one.
    assert second.usage.input_tokens == alone + 2 * len("\x01One")


def test_the_oldest_turns_go_where_the_context_is_full(client: openai.OpenAI) -> None:
    """The context has 4096 tokens, of which a byte is one and the beginning of a message as well."""
    rules = {"role": "developer", "content": "Rules."}
    turns: list[Any] = []
    for letter in "abcdef":
        turns += [{"role": "user", "content": letter * 500}, {"role": "assistant", "content": letter * 400}]
    asked = [rules, *turns, {"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        whole(client, asked)
    # A quarter is left for the answer, or as much as is asked for.
    for fields, num_turns in (({}, 3), ({"max_output_tokens": 400}, 4), ({"max_output_tokens": 4000}, 2)):
        answered = whole(client, asked, truncation="auto", **fields)
        assert (answered.output_text, answered.truncation) == ("Hi", "auto")
        kept = [rules, *turns[-2 * num_turns :], {"role": "user", "content": "Hi"}]
        assert answered.usage.input_tokens == whole(client, kept).usage.input_tokens
    # All that was asked with is kept.
    assert len(list(client.responses.input_items.list(answered.id))) == len(asked)


def test_what_fits_is_not_truncated_and_the_last_turn_never_is(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": letter * 1700} for letter in "ab"]
    tokens = whole(client, asked).usage.input_tokens
    assert whole(client, asked, truncation="auto").usage.input_tokens == tokens
    asked.append({"role": "user", "content": "c" * 5000})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        whole(client, asked, truncation="auto")


def test_a_stored_item_by_its_id(client: openai.OpenAI) -> None:
    first = whole(client, "One")
    items: list[Any] = [{"type": "item_reference", "id": first.output[0].id}]
    assert whole(client, items).output_text == "One"


@pytest.mark.parametrize("kind", [{}, {"type": None}])
def test_messages_and_references_need_no_type(client: openai.OpenAI, kind: dict[str, Any]) -> None:
    message_id = whole(client, "Hi").output[0].id
    items: Any = [{"id": message_id, **kind}, {"id": "mine", "role": "user", "content": "Bye", **kind}]
    response = whole(client, items)
    shown = client.responses.input_items.list(response.id, order="asc").data
    assert [(item.type, item.id) for item in shown] == [("message", message_id), ("message", "mine")]


def test_items_with_one_id_are_told_apart(client: openai.OpenAI) -> None:
    first = whole(client, [{"id": "a", "role": "user", "content": text} for text in ("1", "2")])
    items: Any = [*first.output, {"type": "item_reference", "id": first.output[0].id}]
    second = whole(
        client, [*items, {"id": "a", "role": "user", "content": "3"}], previous_response_id=first.id
    )
    pages = client.responses.input_items.list(second.id, order="asc", limit=1).iter_pages()
    shown = [item for page in itertools.islice(pages, 9) for item in page.data]
    assert [item.content[0].text for item in shown] == ["1", "2", "2", "2", "2", "3"]
    assert len({item.id for item in shown}) == 6
    assert [item.id for item in shown if item.id in ("a", first.output[0].id)] == ["a", first.output[0].id]


def test_nothing_is_kept_that_is_not_to_be(client: openai.OpenAI) -> None:
    response = whole(client, "Hi", store=False)
    deleted = whole(client, "Hi")
    client.responses.delete(deleted.id)
    for each in (response, deleted):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(each.id)


def test_an_ended_response_is_kept_before_its_last_event(client: openai.OpenAI) -> None:
    *_, last = streamed(client, "One")
    assert whole(client, "Two", previous_response_id=last.response.id).output_text == "Two"


def test_only_what_runs_in_the_background_could_be_cancelled(client: openai.OpenAI) -> None:
    response = whole(client, "Hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_a_response_belongs_to_its_key() -> None:
    with scripted_model.serving(None, api_keys=("one", "two")) as url:
        one, two = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        with one, two:
            response = whole(one, "Hi")
            attempts: list[Callable[[], Any]] = [
                lambda: two.responses.retrieve(response.id),
                lambda: two.responses.delete(response.id),
                lambda: two.responses.input_items.list(response.id),
                lambda: whole(two, "Hi", previous_response_id=response.id),
                lambda: whole(two, [{"type": "item_reference", "id": response.output[0].id}]),
            ]
            for attempt in attempts:
                with pytest.raises(openai.NotFoundError):
                    attempt()
            assert one.responses.retrieve(response.id).id == response.id


# Tools.


def test_namespaces_are_flattened_and_found_again(client: openai.OpenAI) -> None:
    tools: list[Any] = [
        {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER]},
        {"type": "web_search"},
    ]
    response = whole(client, HERMES([("crm__get_weather", {"days": 1})]), tools=tools)
    [call] = response.output
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("crm", "get_weather", {"days": 1})
    assert [tool.type for tool in response.tools] == ["namespace"]
    # It comes back as it went, and the template shows the model its own name.
    shown = [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}]
    flat = [{**shown[0], "name": "crm__get_weather", "namespace": None}, shown[1]]
    lengths = {whole(client, items, tools=tools).usage.input_tokens for items in (shown, flat)}
    assert len(lengths) == 1


def test_tools_of_free_text(client: openai.OpenAI) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools: list[Any] = [{"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar}]
    patch = '*** Begin Patch\n"é"\n*** End Patch'
    text = HERMES([("apply_patch", {"input": patch})])
    [call] = whole(client, text, tools=tools).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", patch)
    events = streamed(client, text, tools=tools)
    [item] = built(events)
    assert (item["type"], item["input"]) == ("custom_tool_call", patch)
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    assert whole(client, [call.to_dict(), output], tools=tools).output_text == "Done."


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_calls_that_are_required(client: openai.OpenAI, choice: Any) -> None:
    other = {"type": "function", "name": "other", "parameters": None, "strict": None}
    response = whole(client, HERMES(CALLS[:1]), tools=[WEATHER, other], tool_choice=choice)
    assert [item.name for item in response.output] == ["get_weather"]
    assert json.loads(json.dumps(response.to_dict()["tool_choice"])) == choice


def test_no_calls(client: openai.OpenAI) -> None:
    text = HERMES(CALLS[:1])
    response = whole(
        client, text, tools=[WEATHER], tool_choice="none", extra_body={"skip_special_tokens": False}
    )
    assert response.output_text == text


# What becomes of what the request says of itself, and of one that fails.


def test_what_the_request_says_is_repeated(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "metadata": {"a": "b"},
        "instructions": "Be brief.",
        "max_output_tokens": 40,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": None},
        "temperature": 0.5,
        "top_p": 0.5,
        "tool_choice": "none",
        "top_logprobs": 1,
        "truncation": "disabled",
    }
    response = whole(client, "Hi", **fields).to_dict()
    assert {name: response[name] for name in fields} == fields


def test_a_failure_is_an_event(client: openai.OpenAI) -> None:
    events = streamed(client, "Hi" * 1000, extra_body={"timeout": 0.001})
    assert [event.sequence_number for event in events] == list(range(len(events)))
    failed = events[-1]
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.message.startswith("the request did not end within its time limit; ")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(failed.response.id)


def test_a_client_that_leaves_ends_its_request(tiny_server: ServerProcess) -> None:
    asked = {"input": "Hi", "stream": True, "max_output_tokens": 100_000}
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.responses.create(model="tiny", **asked, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 30
    while "POST /v1/responses 499 " not in tiny_server.log:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert tiny_server.get("/load") == (200, {"server_load": 0})


# What is refused.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_file", "file_data": "x"}],
                    }
                ]
            },
            "input[0].output[0].type",
        ),
        ({"input": "Hi", "background": True}, "background"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "Hi", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "Hi", "truncation": "some"}, "truncation"),
        ({"input": "Hi", "n": 2}, "n"),
        ({"input": "Hi", "max_tokens": 2}, "max_tokens"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "metadata": {"a": 1}}, "metadata"),
        ({"input": "Hi", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"input": "Hi", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "text.format",
        ),
        ({"input": "Hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "Hi", "tools": [WEATHER, WEATHER]}, "tools"),
        ({"input": 2 * [HI], "truncation": "auto", "tools": [WEATHER, WEATHER]}, "tools"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice"),
        (
            {"input": "Hi", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
        ),
        ({"input": "Hi", "tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "Hi", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "Hi", "temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_is_refused(url: str, fields: dict[str, Any], param: str) -> None:
    reply = send(url, "POST", "/v1/responses", fields)
    assert reply.status == 400
    assert reply.error["param"] == param, reply.error


def test_limits_have_the_names_of_this_api(url: str) -> None:
    fields = {"input": "Hi", "min_tokens": 5, "max_output_tokens": 3}
    message = send(url, "POST", "/v1/responses", fields).error["message"]
    assert message == "`min_tokens` must be at most `max_output_tokens`, which is 3, got 5"


def test_what_is_not_there(url: str) -> None:
    asked = {"input": "Hi", "previous_response_id": "resp_none"}
    for method, path, body, param in [
        ("POST", "/v1/responses", asked, "previous_response_id"),
        ("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id"),
        ("GET", "/v1/responses/resp_none", None, "response_id"),
        ("DELETE", "/v1/responses/resp_none", None, "response_id"),
        ("GET", "/v1/responses/resp_none/input_items", None, "response_id"),
    ]:
        reply = send(url, method, path, body)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (404, param, "response_not_found")


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=none"])
def test_lists_are_asked_for_properly(client: openai.OpenAI, url: str, query: str) -> None:
    response = whole(client, "Hi")
    reply = send(url, "GET", f"/v1/responses/{response.id}/input_items?{query}")
    assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])


def test_a_past_stream_cannot_be_had_again(client: openai.OpenAI, url: str) -> None:
    response = whole(client, "Hi")
    reply = send(url, "GET", f"/v1/responses/{response.id}?stream=true")
    assert (reply.status, reply.error["param"]) == (400, "stream")


def test_what_codex_sends(client: openai.OpenAI, url: str) -> None:
    body = {
        "model": "scripted",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": EVERYTHING}]},
        ],
        "tools": [
            {**WEATHER, "strict": False},
            {"type": "namespace", "name": "mcp__x", "description": "X.", "tools": [WEATHER]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"a": "b"},
    }
    events = [
        json.loads(line.removeprefix("data: "))
        for line in send(url, "POST", "/v1/responses", body).body.decode().split("\n")
        if line.startswith("data: ")
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    # It brings reasoning back without its text.
    history = [{**item, "content": None} if item["type"] == "reasoning" else item for item in done]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Sunny."}
        for item in done
        if item["type"] == "function_call"
    ]
    again = {**body, "input": [*body["input"], *history, *outputs]}
    reply = send(url, "POST", "/v1/responses", {**again, "stream": False})
    assert reply.json["output"][0]["content"][0]["text"] == "Sunny."
    with_text = {**body, "input": [*body["input"], *done, *outputs], "stream": False}
    usage = send(url, "POST", "/v1/responses", with_text).json["usage"]
    assert usage["input_tokens"] == reply.json["usage"]["input_tokens"]
