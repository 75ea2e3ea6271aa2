"""Replies are what OpenAI's own description of its API says."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from client_process import run

import scripted_model
import streamed
from tool_call_writers import TOOL, WRITERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHECK = Path(__file__).parent / "scripts" / "check_schema.py"
CHAT = {"messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 6}
TEXT = {"prompt": ["The capital of France is", "Once"], "max_tokens": 6}
USAGE = {"stream_options": {"include_usage": True}}


def check(python_of, tmp_path: Path, **instances: Any) -> None:
    run([python_of("openai-schema"), "-I", CHECK, "openai"], cwd=tmp_path, stdin=json.dumps(instances))


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"temperature": 0}, {"logprobs": True, "top_logprobs": 2}])
def test_chats(python_of, server, tmp_path, fields):
    status, whole = server.post("/v1/chat/completions", CHAT | fields)
    assert status == 200
    chunks = streamed.chunks(server.url, "/v1/chat/completions", CHAT | fields | USAGE)
    check(
        python_of, tmp_path, CreateChatCompletionResponse=[whole], CreateChatCompletionStreamResponse=chunks
    )


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True}])
def test_completions(python_of, server, tmp_path, fields):
    status, whole = server.post("/v1/completions", TEXT | fields)
    assert status == 200
    chunks = streamed.chunks(server.url, "/v1/completions", TEXT | fields)
    check(python_of, tmp_path, CreateCompletionResponse=[whole])
    # What of it is no whole: OpenAI describes no chunks of completions.
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    check(python_of, tmp_path, CreateCompletionResponse=chunks)


HERMES = WRITERS["hermes"]
FUNCTION = {"type": "function", **TOOL["function"]}
TOOLS = [
    FUNCTION,
    {"type": "custom", "name": "patch", "description": "Patches."},
    {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [FUNCTION]},
]
CALLS = [("get_weather", {"days": 3}), ("patch", {"input": "x"}), ("crm__get_weather", {})]


def ask(url: str, path: str, body: Any = None) -> list[Any]:
    """The reply, or the events of its stream."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        lines = reply.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: ", "{"))]


@pytest.fixture(scope="module")
def scripted():
    """The URL of a model that reasons and calls, and says what the last message does."""
    with scripted_model.serving("hermes", "qwen3") as url:
        yield url


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2},
        {"instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
        {"input": HERMES(CALLS[:1]), "tool_choice": {"type": "function", "name": "get_weather"}},
        {
            "input": '"Hi"',
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["Hi"]}}},
        },
        {"max_output_tokens": 30},
    ],
)
def test_responses(python_of, scripted, tmp_path, fields):
    asked = {"input": f"<think>Hm.</think>Hello {HERMES(CALLS)}", "tools": TOOLS} | fields
    whole = ask(scripted, "/v1/responses", asked)[0]
    events = ask(scripted, "/v1/responses", asked | {"stream": True})
    assert events[-1]["type"] == f"response.{whole['status']}"
    check(python_of, tmp_path, Response=[whole], ResponseStreamEvent=events)


def test_a_response_that_fails(python_of, scripted, tmp_path):
    events = ask(scripted, "/v1/responses", {"input": "Hi" * 1000, "timeout": 0.001, "stream": True})
    assert events[-1]["type"] == "response.failed"
    check(python_of, tmp_path, ResponseStreamEvent=events)


def test_what_is_kept_of_responses(python_of, scripted, tmp_path):
    asked = {"input": f"<think>Hm.</think>Hello {HERMES(CALLS)}", "tools": TOOLS}
    first = ask(scripted, "/v1/responses", asked)[0]
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "Done."}
        for item in first["output"]
        if "call_id" in item
    ]
    assert len(results) == len(CALLS)
    again = {"input": results, "previous_response_id": first["id"]}
    second = ask(scripted, "/v1/responses", again)[0]
    items = ask(scripted, f"/v1/responses/{second['id']}/input_items")[0]
    check(python_of, tmp_path, Response=[second], ResponseItemList=[items])


def test_models(python_of, server, tmp_path):
    _, listed = server.get("/v1/models")
    _, model = server.get("/v1/models/smollm2")
    check(python_of, tmp_path, ListModelsResponse=[listed], Model=[model])


def test_errors(python_of, server, tmp_path):
    answers = [
        server.post("/v1/chat/completions", {}),
        server.post("/v1/chat/completions", CHAT | {"model": "other"}),
        server.post("/v1/chat/completions", CHAT | {"logit_bias": {"x": 1}}),
        server.post("/v1/completions", {"prompt": [1] * 9000}),
        server.post("/v1/completions", b"{"),
        server.post("/v1/completions", b"a=1", {"Content-Type": "application/x-www-form-urlencoded"}),
        server.get("/v1/completions"),
        server.get("/v1/nothing"),
        server.get("/v1/models/other"),
        server.get("/v1/models", {"Host": "evil.example"}),
    ]
    assert [status for status, _ in answers] == [400, 404, 400, 400, 400, 415, 405, 404, 404, 403]
    check(python_of, tmp_path, ErrorResponse=[body for _, body in answers])


def test_the_check_can_fail(python_of, tmp_path):
    with pytest.raises(AssertionError, match="'owned_by' is a required property"):
        check(python_of, tmp_path, Model=[{"id": "a", "object": "model", "created": 1}])
