"""`engine.max_output_tokens` holds for every request that generates, whatever it asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tiny_folder
from server_process import ServerProcess

CAP = 5
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
COMPLETION = {"prompt": ["Hi", "Ho"], "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_folder.save(tmp_path_factory.mktemp("model") / "tiny")
    with ServerProcess(str(folder), "--max-output-tokens", str(CAP), env={}) as process:
        yield process.ready()


@pytest.mark.parametrize(("asked", "given"), [({}, CAP), ({"max_tokens": 3}, 3), ({"max_tokens": 900}, CAP)])
@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)], ids=["chat", "completion"]
)
def test_answers_end_at_the_cap(server, path, body, asked, given):
    if path == "completions":
        asked = {"max_tokens": 900} | asked
    status, reply = server.post(f"/v1/{path}", {**body, **asked})
    assert status == 200, reply
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    assert reply["usage"]["completion_tokens"] == given * len(reply["choices"])


def test_responses_end_at_the_cap(server):
    status, reply = server.post(
        "/v1/responses", {"input": "Hi", "max_output_tokens": 900, "ignore_eos": True}
    )
    assert status == 200, reply
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["usage"]["output_tokens"] == CAP


def test_messages_end_at_the_cap(server):
    body = {"messages": CHAT["messages"], "max_tokens": 900, "temperature": 0}
    status, reply = server.post("/v1/messages", body)
    assert status == 200, reply
    assert (reply["stop_reason"], reply["usage"]["output_tokens"]) == ("max_tokens", CAP)
