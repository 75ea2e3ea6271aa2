"""The `openai` package: every way to ask but for tools, with replies held strictly to its own types."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from server_process import ServerProcess

pytestmark = pytest.mark.slow

ANSWER = "The capital of France is Paris."
ASKED: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Name the capital of France."}],
    "temperature": 0,
}
#: Each adds something to the reply.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 3, "temperature": 1, "seed": 1, "max_tokens": 4},
    {"max_completion_tokens": 2, "user": "someone", "metadata": {"a": "b"}, "store": False},
]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check(answer: Any, kind: Any) -> None:
    """The SDK itself takes nearly anything."""
    sent = answer.to_dict(mode="json", exclude_unset=True)
    TypeAdapter(kind).validate_python(sent, strict=True)


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: "-".join(fields) or "plain")
def test_chats(client, fields):
    whole = client.chat.completions.create(**{**ASKED, **fields})
    check(whole, ChatCompletion)
    texts = [choice.message.content for choice in whole.choices]
    streamed = [""] * len(texts)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(**{**ASKED, **fields, **options}):
        check(chunk, ChatCompletionChunk)
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens


def test_the_streaming_helper(client):
    with client.chat.completions.stream(**ASKED, logprobs=True) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == ANSWER
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= set(kinds)


# With both the first token's log probability is null, which OpenAI's types know nothing of.
@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"echo": True}], ids=["logprobs", "echo"])
def test_completions(client, fields):
    fields = {"model": "smollm2", "prompt": ["The capital of France is", "Once"], "temperature": 0} | fields
    fields |= {"max_tokens": 4}
    whole = client.completions.create(**fields)
    check(whole, Completion)
    streamed = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]
    assert " Paris" in streamed[0]


def test_headers(client):
    raw = client.chat.completions.with_raw_response.create(
        **ASKED, extra_headers={"X-Request-Id": "trace-openai"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "trace-openai"
    assert raw.parse().choices[0].message.content == ANSWER
    with client.chat.completions.with_streaming_response.create(**ASKED, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert sum(len(chunk.choices) for chunk in response.parse()) > 2


def test_leaving_a_stream_leaves_the_server_well(client):
    with client.chat.completions.create(
        **ASKED, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**ASKED).choices[0].message.content == ANSWER


def test_async(server):
    async def ask(client: openai.AsyncOpenAI) -> str:
        return (await client.chat.completions.create(**ASKED)).choices[0].message.content or ""

    async def stream(client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(**ASKED, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(each(client) for each in (ask, stream) * 3))

    assert asyncio.run(at_once()) == [ANSWER] * 6


def test_models(client):
    [model] = client.models.list()
    check(model, Model)
    assert client.models.retrieve(model.id) == model


@pytest.mark.parametrize(
    ("fields", "error", "code", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found", None),
        ({"top_p": 7}, openai.BadRequestError, None, "top_p"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
    ],
    ids=["model", "value", "empty", "long"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, fields, error, code, param, stream):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{**ASKED, **fields}, stream=stream)
    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.request_id
    assert raised.value.body.keys() == {"message", "type", "param", "code"}


def test_a_client_that_tires(client):
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            **ASKED, max_tokens=4000, timeout=0.01, extra_body={"ignore_eos": True}
        )
