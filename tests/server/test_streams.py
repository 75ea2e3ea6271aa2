"""Whatever a request asks, its stream amounts to the whole reply."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamed
from server_process import ServerProcess

BYTE = st.integers(0, 255)
TEXT = st.text(alphabet="aé 京😀\n", min_size=1, max_size=12)
TOKENS = st.lists(BYTE, min_size=1, max_size=300)
PROMPT = TEXT | TOKENS | st.lists(TEXT | TOKENS, min_size=1, max_size=3)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "min_tokens": st.integers(0, 1),
    "temperature": st.sampled_from([0, 0.3, 1, 3]),
    "top_p": st.sampled_from([0.5, 1]),
    "top_k": st.sampled_from([-1, 1, 7]),
    "min_p": st.sampled_from([0, 0.1]),
    "presence_penalty": st.sampled_from([0, 1.5]),
    "frequency_penalty": st.sampled_from([0, -1]),
    "repetition_penalty": st.sampled_from([1, 1.3]),
    "logit_bias": st.dictionaries(BYTE.map(str), st.integers(-5, 5), max_size=2),
    "bad_words": st.lists(TEXT, max_size=2),
    "stop": st.lists(st.text(alphabet="aeiou #!\u0100", min_size=1, max_size=2), max_size=4),
    "stop_token_ids": st.lists(BYTE, max_size=20),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "truncate_prompt_tokens": st.integers(1, 300) | st.just(-1),
    "add_special_tokens": st.booleans(),
}
COMPLETION = st.fixed_dictionaries(
    {"prompt": PROMPT, "seed": st.integers(), "max_tokens": st.integers(1, 24)},
    optional={**FIELDS, "echo": st.booleans(), "logprobs": st.integers(0, 3)},
)
CHAT = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}), min_size=1, max_size=3
        ),
        "seed": st.integers(),
        "max_tokens": st.integers(1, 24),
    },
    optional={**FIELDS, "logprobs": st.just(True)},
)
MANY = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    status, whole = server.post(path, body)
    assert status == 200, whole
    events = streamed.chunks(server.url, path, {**body, "stream_options": {"include_usage": True}})
    choices = streamed.joined(events)
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(choices)))
    for choice, expected in zip(choices, whole["choices"], strict=True):
        text = expected["text"] if "text" in expected else expected["message"]["content"]
        assert (choice["text"], choice["finish_reason"]) == (text, expected["finish_reason"])
        assert [each[0] if isinstance(each, tuple) else each["token"] for each in choice["logprobs"]] == [
            each[0] if isinstance(each, tuple) else each["token"]
            for each in streamed.entries(expected["logprobs"])
        ]
        assert choice["token_ids"] == expected.get("token_ids", [])
        assert choice.get("prompt_token_ids") == expected.get("prompt_token_ids")
    usages = [event["usage"] for event in events if "usage" in event]
    for usage in (*usages, whole["usage"]):
        del usage["prompt_tokens_details"]  # the second time more is kept
    assert usages == [whole["usage"]]


@MANY
@given(body=COMPLETION)
def test_completions(tiny_server, body):
    check(tiny_server, "/v1/completions", body)


@MANY
@given(body=CHAT)
def test_chats(tiny_server, body):
    check(tiny_server, "/v1/chat/completions", body)
