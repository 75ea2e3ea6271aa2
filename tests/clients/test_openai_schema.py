"""Replies are what OpenAI's own description of its API says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client_process import run

import streamed

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
