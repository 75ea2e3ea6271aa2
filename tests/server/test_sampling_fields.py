"""Sampling fields and log probabilities through the real server, as the `openai` SDK sees them."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from server_process import ServerProcess

# What each field does, faster tests see of engines and of a tiny model.
pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 8, **fields}
    return client.chat.completions.create(**fields)


def complete(client: openai.OpenAI, prompt: str = "The capital of France is", **fields: Any) -> Any:
    fields = {"model": "smollm2", "temperature": 0, "max_tokens": 6, **fields}
    return client.completions.create(prompt=prompt, **fields)


def test_logprobs_of_a_chat_whole_and_streamed(client):
    whole = chat(client, logprobs=True, top_logprobs=3, max_tokens=40).choices[0]
    entries = whole.logprobs.content
    assert whole.finish_reason == "stop"
    assert entries[-1].token == "<|im_end|>"
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == whole.message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        top = [each.logprob for each in entry.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert (entry.top_logprobs[0].token, top[0]) == (entry.token, entry.logprob)
        assert sum(map(math.exp, top)) <= 1 + 1e-6
    streamed = [
        (chunk.choices[0].delta.content, chunk.choices[0].logprobs)
        for chunk in chat(client, logprobs=True, top_logprobs=3, max_tokens=40, stream=True)
    ]
    assert "".join(text or "" for text, _ in streamed) == whole.message.content
    assert [entry for _, logprobs in streamed if logprobs for entry in logprobs.content] == entries


def test_logprobs_of_a_chat_only_if_asked_for(client):
    assert chat(client).choices[0].logprobs is None
    entries = chat(client, logprobs=True).choices[0].logprobs.content
    assert len(entries) == 8
    assert all(entry.top_logprobs == [] for entry in entries)


def test_logprobs_come_while_a_stop_string_holds_text_back(client):
    text = complete(client).choices[0].text
    chunks = list(complete(client, logprobs=0, stop=[text + "never"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert sum(len(logprobs.tokens) for logprobs in told) == 6


def test_logprobs_of_a_completion(client):
    choice = complete(client, logprobs=2, temperature=1.5, seed=3, max_tokens=12).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for index, token in enumerate(logprobs.tokens):
        assert choice.text[logprobs.text_offset[index] :].startswith(token)
        top = logprobs.top_logprobs[index]
        assert top[token] == logprobs.token_logprobs[index]
        assert len(top) in (2, 3)
    assert any(len(top) == 3 for top in logprobs.top_logprobs)


def test_parts_of_characters_are_spelled_as_bytes_and_offsets_fit_the_text(client):
    prompt = "Emojis: 🦜🦩🦚🦜🦩🦚🦜"
    choice = complete(client, prompt, logprobs=0, max_tokens=16).choices[0]
    parts = [token for token in choice.logprobs.tokens if token.startswith("bytes:\\x")]
    assert parts
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(choice.text)
    assert choice.logprobs.top_logprobs == [
        {token: logprob}
        for token, logprob in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    ]


def test_a_bias_bans_or_forces_tokens(client, server):
    plain = chat(client, logprobs=True).choices[0]
    _, answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "logit_bias": {"19": 100}})
    forced = answer["choices"][0]["text"]
    biased = chat(client, logit_bias={"19": 100}, max_tokens=3).choices[0]
    assert biased.message.content == 3 * forced != plain.message.content[: 3 * len(forced)]


def test_a_bad_word_never_comes(client):
    plain = chat(client, max_tokens=16).choices[0].message.content
    assert "Paris" in plain
    without = chat(client, max_tokens=16, extra_body={"bad_words": ["Paris"]}).choices[0].message.content
    assert "Paris" not in without


def test_an_answer_goes_on_for_min_tokens(client):
    short = chat(client, max_tokens=40)
    assert short.choices[0].finish_reason == "stop"
    at_least = short.usage.completion_tokens + 5
    long = chat(client, max_tokens=40, extra_body={"min_tokens": at_least})
    assert long.usage.completion_tokens >= at_least


def test_only_allowed_tokens_come(client):
    entries = (
        chat(client, logprobs=True, extra_body={"allowed_token_ids": [20, 21]}).choices[0].logprobs.content
    )
    assert len({entry.token for entry in entries}) <= 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"allowed_token_ids": [-1]}}, "allowed_token_ids[0]"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words[0]"),
    ],
)
def test_what_cannot_be_is_refused(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == param
