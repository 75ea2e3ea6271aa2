"""Every way that the `anthropic` package asks, with replies held strictly to its own types.

The server's model reasons and calls as Qwen3 does, and writes what it is told.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

URL, KEY = sys.argv[1:]
THOUGHT = "<think>Where is that?</think>"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"place": "Rome", "days": 2}}</tool_call>'
INPUT = {"place": "Rome", "days": 2}
TOOL: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["place"],
    },
}


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": text}],
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
        **fields,
    }


def check(answer: BaseModel, kind: Any) -> None:
    """The SDK itself takes nearly anything."""
    sent = answer.model_dump(mode="json", exclude_unset=True)
    TypeAdapter(kind).validate_python(sent, strict=True)


def kinds(message: Message) -> list[str]:
    return [block.type for block in message.content]


client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)

# A whole round trip of a tool, whole and streamed.
text = f"{THOUGHT}I look. {CALL}"
whole = client.messages.create(**asked(text))
check(whole, Message)
assert kinds(whole) == ["thinking", "text", "tool_use"], whole
assert whole.content[-1].input == INPUT
assert whole.stop_reason == "tool_use"
assert whole._request_id
assert whole.id == f"msg_{whole._request_id}"

for event in client.messages.create(**asked(text), stream=True):
    check(event, RawMessageStreamEvent)
with client.messages.stream(**asked(text)) as stream:
    helped = [event.type for event in stream]
    streamed = stream.get_final_message()
assert {"text", "thinking", "signature", "input_json", "content_block_stop", "message_stop"} <= set(helped)
assert [block.model_dump(exclude={"id"}, exclude_none=True) for block in streamed.content] == [
    block.model_dump(exclude={"id"}, exclude_none=True) for block in whole.content
]
assert streamed.stop_reason == "tool_use"
assert streamed.usage.output_tokens == whole.usage.output_tokens

result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": "Sunny."}
messages = [
    {"role": "user", "content": text},
    {"role": "assistant", "content": whole.content},
    {"role": "user", "content": [result, {"type": "text", "text": "It is sunny."}]},
]
answer = client.messages.create(**asked("", messages=messages))
check(answer, Message)
assert (kinds(answer), answer.content[0].text, answer.stop_reason) == (["text"], "It is sunny.", "end_turn")

counted = client.messages.count_tokens(
    **{key: value for key, value in asked("", messages=messages).items() if key != "max_tokens"}
)
check(counted, MessageTokensCount)
assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens

stopped = client.messages.create(**asked("one two three", stop_sequences=["two"]))
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
beta = client.beta.messages.create(**asked("Beta"), betas=["unheard-of-2027-01-01"])
assert beta.content[0].text == "Beta"


class Person(BaseModel):
    name: str
    age: int


parsed = client.messages.parse(**asked('{"name": "Ava", "age": 25}', tools=[]), output_format=Person)
assert parsed.parsed_output == Person(name="Ava", age=25)

# The key of a bearer, and from an async client.
bearer = anthropic.AsyncAnthropic(base_url=URL, auth_token=KEY, max_retries=0)


async def ask() -> str:
    async with bearer.messages.stream(**asked("Asked")) as stream:
        return "".join([text async for text in stream.text_stream])


async def ask_at_once() -> list[str]:
    async with bearer:
        return await asyncio.gather(ask(), ask())


assert asyncio.run(ask_at_once()) == ["Asked", "Asked"]


def refusal(about: object, ask: Callable[[], object]) -> anthropic.APIStatusError:
    try:
        ask()
    except anthropic.APIStatusError as exc:
        return exc
    raise AssertionError(f"nothing is wrong with {about}")


LONG, TOO_LARGE = ([{"role": "user", "content": "a" * length}] for length in (9000, 90_000))
ERRORS: list[tuple[type[anthropic.APIStatusError], dict[str, Any], str]] = [
    (anthropic.BadRequestError, {"extra_body": {"top_p": 7}}, "`top_p` must be"),
    (anthropic.BadRequestError, {"messages": LONG}, "prompt is too long"),
    (anthropic.RequestTooLargeError, {"messages": TOO_LARGE}, "request_too_large"),
]
for kind, fields, said in ERRORS:
    for is_streamed in (False, True):
        error = refusal(said, lambda: client.messages.create(**asked("A", **fields), stream=is_streamed))  # noqa: B023
        assert type(error) is kind, error
        assert error.request_id
        assert error.body["type"] == "error"
        assert error.body["request_id"] == error.request_id
        assert said in str(error)
stranger = client.with_options(api_key="other")
error = refusal("a stranger", lambda: stranger.messages.create(**asked("A")))
assert type(error) is anthropic.AuthenticationError
assert error.body["error"]["type"] == "authentication_error"
error = refusal("no route", lambda: client.get("/v1/messages/batches/x", cast_to=object))
assert type(error) is anthropic.NotFoundError
assert error.body["error"]["type"] == "not_found_error"
