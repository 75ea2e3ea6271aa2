"""Several answers in one reply, what is told of prompts, and what else is special to one choice."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import mlx.core as mx
import pytest

import streamed
import tiny_models
from server_process import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}
TOLERANCE = 1e-3


def complete(server: ServerProcess, prompt: Any, **fields: Any) -> Any:
    status, answer = server.post(COMPLETIONS, {"prompt": prompt, **SAMPLED, **fields})
    assert status == 200, answer
    return answer


def chat(server: ServerProcess, text: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], **SAMPLED, **fields}
    status, answer = server.post(CHAT, body)
    assert status == 200, answer
    return answer


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def log_softmax(prompt: list[int]) -> list[list[float]]:
    """By the server's model, of what follows each token."""
    logits = tiny_models.make("llama")(mx.array([prompt]))[0]
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()


def test_choices_differ_and_the_first_is_that_of_a_request_for_one(tiny_server):
    one, other = (texts(complete(tiny_server, "Once", seed=seed))[0] for seed in (5, 6))
    answer = complete(tiny_server, "Once", seed=5, n=4, best_of=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts(answer)[0] == one
    assert len({*texts(answer), other}) == 5
    assert texts(complete(tiny_server, "Once", seed=5, n=4)) == texts(answer)
    assert len(set(texts(complete(tiny_server, "Once", n=4)))) == 4
    assert len(set(texts(complete(tiny_server, "Once", n=3, temperature=0)))) == 1


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**200)])
def test_any_seed_has_choices(tiny_server, seed):
    answers = [texts(complete(tiny_server, "Once", seed=seed, n=2)) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_choices_of_a_chat(tiny_server):
    answer = chat(tiny_server, "Once", seed=5, n=3)
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents == texts(complete(tiny_server, "Once", seed=5, n=3))
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize(
    "prompts", [["Once", "a", "upon a time"], [[5, 6, 7], [9], [1, 2]], ["a", [1, 2], "c"]]
)
def test_prompts_come_one_after_the_other_with_their_choices(tiny_server, prompts):
    answer = complete(tiny_server, prompts, seed=1, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [complete(tiny_server, prompt, seed=1, n=2) for prompt in prompts]
    assert texts(answer) == [text for each in alone for text in texts(each)]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(each["usage"][name] for each in alone)


def test_choices_share_one_prefill(tiny_server):
    prompt = [(7 * i + 3) % 256 for i in range(700)]
    answer = complete(tiny_server, prompt, n=4, seed=0, return_token_ids=True)
    assert answer["usage"]["prompt_tokens"] == 700
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["token_ids"]) == 12


def test_streamed_choices_interleave(tiny_server):
    body = {**SAMPLED, "max_tokens": 40, "prompt": ["a", "b"], "n": 2, "seed": 3}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = streamed.chunks(tiny_server.url, COMPLETIONS, body | options)
    order = [event["choices"][0]["index"] for event in events if event["choices"]]
    assert order != sorted(order)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert events[-1] | {"usage": None} == {**events[0], "choices": [], "usage": None}
    assert events[-1]["usage"]["completion_tokens"] == 160
    assert events[-1]["usage"]["prompt_tokens"] == 2


def test_each_streamed_choice_of_a_chat_begins_with_its_role(tiny_server):
    body = {"messages": [{"role": "user", "content": "ab"}], **SAMPLED, "n": 3, "return_token_ids": True}
    events = streamed.chunks(tiny_server.url, CHAT, body)
    begun = [event["choices"][0] for event in events[:3]]
    assert [(each["index"], each["delta"]["role"]) for each in begun] == [
        (index, "assistant") for index in range(3)
    ]
    assert events[0]["prompt_token_ids"] == chat(tiny_server, "ab", return_token_ids=True)["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in events[1:])
    assert all(len(choice["token_ids"]) == 12 for choice in streamed.joined(events))


def test_more_than_can_be_held_is_refused_before_any_work(tiny_server):
    for fields in ({"n": 25}, {"prompt": ["a"] * 25}, {"prompt": ["a"] * 9, "n": 3}):
        status, answer = tiny_server.post(COMPLETIONS, {"prompt": "a", **fields})
        assert (status, answer["error"]["param"]) == (400, "n")
        assert "no more than 24" in answer["error"]["message"]


def test_all_are_admitted_or_none(tiny_server):
    connection = http.client.HTTPConnection(urlsplit(tiny_server.url).netloc, timeout=60)
    body = {**SAMPLED, "prompt": "a", "n": 20, "max_tokens": 4000, "stream": True}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.read(1)
    status, answer = tiny_server.post(COMPLETIONS, {"prompt": "b", "n": 5, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(complete(tiny_server, "b", n=4, max_tokens=1)["choices"]) == 4
    response.close()
    connection.close()
    # It takes the server a moment to learn that the client has gone, which the next test relies on.
    while tiny_server.post(COMPLETIONS, {"prompt": "b", "n": 24, "max_tokens": 1})[0] == 429:
        pass


def test_a_prompt_of_several_that_cannot_be_is_named(tiny_server):
    for prompt, param in ((["a", ""], "prompt[1]"), ([[1], [400]], "prompt[1]"), ([[]], "prompt")):
        status, answer = tiny_server.post(COMPLETIONS, {"prompt": prompt})
        assert (status, answer["error"]["param"]) == (400, param)


def test_an_echo_with_logprobs_as_evaluators_want_it(tiny_server):
    prompt = [(13 * i + 5) % 256 for i in range(150)]
    answer = complete(
        tiny_server, [prompt, prompt[:2]], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    for choice, token_ids in zip(answer["choices"], (prompt, prompt[:2]), strict=True):
        told = choice["logprobs"]
        assert {len(column) for column in told.values()} == {len(token_ids) + 1}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        expected = log_softmax(token_ids)
        for row, token_id, logprob, top in zip(
            expected, token_ids[1:], told["token_logprobs"][1:-1], told["top_logprobs"][1:-1], strict=False
        ):
            assert logprob == pytest.approx(row[token_id], abs=TOLERANCE)
            assert max(top.values()) == pytest.approx(max(row), abs=TOLERANCE)
        assert max(told["top_logprobs"][-1].values()) == told["token_logprobs"][-1]
    assert answer["usage"]["completion_tokens"] == 2


def test_an_echo_of_text(tiny_server):
    prompt = "Où est 京?"
    plain = complete(tiny_server, prompt, seed=1)
    echoed = complete(tiny_server, prompt, seed=1, echo=True, logprobs=0)
    [choice] = echoed["choices"]
    assert choice["text"] == prompt + texts(plain)[0]
    assert echoed["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    told = choice["logprobs"]
    num_prompt = len(prompt.encode())
    assert told["text_offset"][:4] == [0, 1, 1, 2]
    assert told["text_offset"][num_prompt] == len(prompt)
    assert told["tokens"][:3] == ["O", "bytes:\\xc3", "bytes:\\xb9"]
    body = {**SAMPLED, "prompt": prompt, "seed": 1, "echo": True, "logprobs": 0}
    [choice] = streamed.joined(streamed.chunks(tiny_server.url, COMPLETIONS, body))
    assert choice["text"] == prompt + texts(plain)[0]
    assert [each[3] for each in choice["logprobs"]] == told["text_offset"]


def test_an_echo_alone(tiny_server):
    answer = complete(tiny_server, ["Hi", [72, 73]], echo=True, max_tokens=0, logprobs=2)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == 2
    assert texts(answer)[0] == "Hi"
    assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (0, 4)
    body = {"prompt": "Hi", "echo": True, "max_tokens": 0}
    [choice] = streamed.joined(streamed.chunks(tiny_server.url, COMPLETIONS, body))
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")


def test_prompt_logprobs(tiny_server):
    prompt = [5, 6, 7, 8]
    [choice] = complete(tiny_server, prompt, prompt_logprobs=2)["choices"]
    whole_chat = chat(tiny_server, "Hello", prompt_logprobs=1, n=2, return_token_ids=True)
    for told, token_ids, num_top in (
        (choice["prompt_logprobs"], prompt, 2),
        (whole_chat["prompt_logprobs"], whole_chat["prompt_token_ids"], 1),
    ):
        assert told[0] is None
        for row, token_id, entry in zip(log_softmax(token_ids), token_ids[1:], told[1:], strict=False):
            own = entry[str(token_id)]
            assert own["logprob"] == pytest.approx(row[token_id], abs=TOLERANCE)
            assert own["rank"] == 1 + sum(other > row[token_id] for other in row)
            assert sorted(each["rank"] for each in entry.values())[:num_top] == list(range(1, num_top + 1))
            assert own["decoded_token"]
    assert "logprobs" not in choice or choice["logprobs"] is None


def test_tokens_by_their_ids(tiny_server):
    [choice] = complete(
        tiny_server, [5, 6], logprobs=1, echo=True, return_tokens_as_token_ids=True, return_token_ids=True
    )["choices"]
    ids = [5, 6, *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    for entry in choice["logprobs"]["top_logprobs"][1:]:
        assert all(name.startswith("token_id:") for name in entry)
    told = chat(tiny_server, "a", logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    [choice] = told["choices"]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


def test_token_ids_only_if_asked_for(tiny_server):
    for answer in (complete(tiny_server, "a"), chat(tiny_server, "a")):
        assert not {"prompt_token_ids", "prompt_logprobs"} & answer.keys()
        assert not {"prompt_token_ids", "token_ids", "prompt_logprobs"} & answer["choices"][0].keys()


def test_the_end_of_a_prompt(tiny_server):
    long = "x" * 9000 + "abc"
    status, answer = tiny_server.post(COMPLETIONS, {"prompt": long})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    answer = complete(tiny_server, long, truncate_prompt_tokens=3, echo=True, seed=1)
    assert answer["usage"]["prompt_tokens"] == 3
    assert texts(answer) == texts(complete(tiny_server, "abc", echo=True, seed=1))
    most = complete(tiny_server, long, truncate_prompt_tokens=-1)
    assert most["usage"]["total_tokens"] == 4096
    ids = chat(tiny_server, "abcdef", truncate_prompt_tokens=2, return_token_ids=True)["prompt_token_ids"]
    assert ids == chat(tiny_server, "ef", return_token_ids=True)["prompt_token_ids"]
    status, answer = tiny_server.post(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 5000})
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_special_tokens_are_shown_if_asked_for(tiny_server):
    fields = {"logit_bias": {"256": 100}, "max_tokens": 2, "temperature": 0}
    assert texts(complete(tiny_server, "a", **fields)) == [""]
    assert texts(complete(tiny_server, "a", skip_special_tokens=False, **fields)) == ["</s></s>"]


def test_what_stopped_an_answer_is_shown_if_asked_for(tiny_server):
    [text] = texts(complete(tiny_server, "a", temperature=0))
    fields = {"temperature": 0, "stop": [text[4:6]]}
    [before] = texts(complete(tiny_server, "a", **fields))
    [with_it] = texts(complete(tiny_server, "a", include_stop_str_in_output=True, **fields))
    assert with_it == before + text[4:6] == text[: len(with_it)]


def test_one_choice_that_fails_ends_the_request(tiny_server):
    [token_id] = complete(tiny_server, "A", return_token_ids=True)["choices"][0]["prompt_token_ids"]
    body = {**SAMPLED, "prompt": ["a", "b"], "n": 2, "bad_words": ["AA"], "allowed_token_ids": [token_id]}
    status, answer = tiny_server.post(COMPLETIONS, body)
    assert status == 500
    assert "allows none of the tokens" in answer["error"]["message"]
    events = streamed.chunks(tiny_server.url, COMPLETIONS, body)
    assert events[-1]["error"] == answer["error"]
    assert not any(each["finish_reason"] for each in streamed.joined(events[:-1]))


def test_what_goes_round_a_gap_cannot_be_cut_or_echoed(tiny_server):
    for fields in ({"echo": True}, {"truncate_prompt_tokens": 1}):
        status, answer = tiny_server.post(COMPLETIONS, {"prompt": "a", "suffix": "b", **fields})
        assert status == 400
        assert [answer["error"]["param"]] == list(fields)
