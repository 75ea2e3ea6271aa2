"""Anthropic's own package, and its own description of its API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_guide import snippet
from client_process import run

import scripted_model
import streamed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
KEY = "a-key"
ANSWER = "The capital of France is Paris."
CALL = '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    with scripted_model.serving("hermes", "qwen3", api_keys=(KEY,), max_body_bytes=50_000) as url:
        yield url


def check(python_of, tmp_path: Path, **instances: Any) -> None:
    command = [python_of("openai-schema"), "-I", SCRIPTS / "check_schema.py", "anthropic"]
    run(command, cwd=tmp_path, stdin=json.dumps(instances))


def test_the_package(python_of, scripted, tmp_path):
    run([python_of("anthropic"), "-I", SCRIPTS / "anthropic_client.py", scripted, KEY], cwd=tmp_path)


def test_the_guide(python_of, server, tmp_path):
    program = snippet("anthropic, for Python", "python", server.url)
    assert run([python_of("anthropic"), "-I", "-c", program], cwd=tmp_path) == f"{ANSWER}\n"


def test_replies_are_as_described(python_of, server, tmp_path):
    body = {"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}
    status, counted = server.post("/v1/messages/count_tokens", {"messages": body["messages"]})
    assert status == 200
    status, whole = server.post("/v1/messages", body | {"max_tokens": 20})
    assert status == 200
    assert [each["text"] for each in whole["content"]] == [ANSWER]
    refused = [
        server.post("/v1/messages", body),
        server.post("/v1/messages", body | {"max_tokens": 1, "model": "other"}),
        server.get("/v1/messages"),
        server.post("/v1/messages/batches", {}),
    ]
    assert [status for status, _ in refused] == [400, 404, 405, 404]
    check(
        python_of,
        tmp_path,
        Message=[whole],
        CountMessageTokensResponse=[counted],
        ErrorResponse=[body for _, body in refused],
    )


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_streams_are_as_described(python_of, scripted, tmp_path, display):
    body = {
        "max_tokens": 500,
        "messages": [{"role": "user", "content": f"<think>Hm.</think>A {CALL} b"}],
        "tools": [LOOK],
        "thinking": {"type": "adaptive", "display": display},
    }
    events = streamed.named_events(scripted, "/v1/messages", body, {"X-Api-Key": KEY})
    described = [event for event in events if event["type"] != "ping"]
    assert len(events) == len(described) + 1
    check(python_of, tmp_path, MessageStreamEvent=described, Message=[events[0]["message"]])


def test_the_check_can_fail(python_of, tmp_path):
    with pytest.raises(AssertionError, match="'request_id' is a required property"):
        check(
            python_of,
            tmp_path,
            ErrorResponse=[{"type": "error", "error": {"type": "api_error", "message": ""}}],
        )
