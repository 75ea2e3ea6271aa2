"""Bodies nested so deeply that the interpreter's stack gives out, at whatever is done with them."""

from __future__ import annotations

import pytest
from in_process import send

import scripted_model

HI = b'"messages": [{"role": "user", "content": "Hi"}]'
DEFINED = b'{"type": "tool_definition", "definition": {"name": "x", "input_schema": %b}}'
ADDED = b'{"role": "system", "content": [{"type": "tool_addition", "tool": %b}]}' % DEFINED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{%b, "tools": [{"function": {"name": "x", "parameters": %%b}}]}' % HI),
        ("/v1/messages", b'{"max_tokens": 1, %b, "tools": [{"name": "x", "input_schema": %%b}]}' % HI),
        ("/v1/messages", b'{"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}, %b]}' % ADDED),
        ("/v1/responses", b'{"input": "Hi", "tools": [{"type": "function", "name": "x", "parameters": %b}]}'),
        ("/tokenize", b'{%b, "tools": [{"function": {"name": "x", "parameters": %%b}}]}' % HI),
        ("/v1/completions", b'{"prompt": "Hi", "guided_json": %b}'),
        ("/v1/embeddings", b'{"input": %b}'),
    ],
)
def test_they_are_refused(path: str, body: bytes) -> None:
    with scripted_model.serving("hermes", "qwen3", script=lambda _: "A") as url:
        for depth in (*range(900, 1000), 100_000):
            reply = send(url, "POST", path, body % (b'{"a":' * depth + b"{}" + b"}" * depth))
            assert reply.status in (200, 400), (depth, reply.body)
        assert "nested too deeply" in reply.json["error"]["message"]
