"""Every route is described, and answers as it is described."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import NAME, Reply, ask, send, with_server

import tiny_folder
from server_process import ServerProcess
from vllm_metal import __version__
from vllm_metal.server.routes import ROUTES

QUESTION = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    reply = ask("GET", "/openapi.json")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json")
    return reply.json


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        kind, _, name = schema["$ref"].removeprefix("#/components/").partition("/")
        schema = document["components"][kind][name]
    return schema


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict) and "$ref" in node:
        yield node["$ref"]
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from references(child)


def test_the_description_is_whole(document: dict[str, Any]) -> None:
    assert (document["openapi"], document["info"]["version"]) == ("3.1.0", __version__)
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(operation.method, operation.path) for operation, _ in ROUTES}
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    for reference in references(document):
        assert resolved(document, {"$ref": reference})
    for operation in operations:
        errors = {status for status in operation["responses"] if status != "200"}
        assert errors >= {"403", "500"}
        assert ("requestBody" in operation) == ("415" in errors) == ("413" in errors)
        assert "security" not in operation


def test_no_described_type_hides_another(document: dict[str, Any]) -> None:
    described = document["components"]["schemas"]
    assert {each.__name__ for operation, _ in ROUTES for each in operation.types} <= described.keys()
    for operation, _ in ROUTES:
        for each in operation.types:
            assert set(each.__struct_encode_fields__) <= described[each.__name__]["properties"].keys()


def test_fields_are_described_as_they_are_read(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["stream"] == {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": False}
    assert fields["messages"]["minItems"] == 1
    assert fields["functions"]["enum"] == [[], None]
    assert fields["user"] == {"description": "Accepted without effect."}
    reply = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(reply) == {"application/json", "text/event-stream"}


def test_keys_are_described_where_they_are_asked_for() -> None:
    document = ask("GET", "/openapi.json", headers={"Authorization": "Bearer key"}, api_keys=("key",)).json
    for path, methods in document["paths"].items():
        for operation in methods.values():
            is_open = path in ("/health", "/ready", "/ping")
            assert operation.get("security") == (None if is_open else [{"key": []}])
            assert ("401" in operation["responses"]) is not is_open


def test_every_route_answers_as_described(document: dict[str, Any]) -> None:
    """With no model: 200 or an error that is described, and HEAD as GET without the body."""

    def talk(urls: list[str]) -> None:
        for operation, _ in ROUTES:
            path = operation.path.replace("{id}", NAME)
            described = document["paths"][operation.path][operation.method]["responses"]
            body = {} if operation.bodies else None
            reply = send(urls[0], operation.method.upper(), path + "?a=1&b", body)
            assert str(reply.status) in described, path
            media_type = reply.headers["Content-Type"].partition(";")[0]
            schema = described[str(reply.status)]["content"][media_type]["schema"]
            if media_type == "application/json" and isinstance(operation.reply, type):
                required = resolved(document, schema).get("required", [])
                assert set(required) <= reply.json.keys()
            if operation.method == "get":
                head = send(urls[0], "HEAD", path)
                assert (head.status, head.body) == (reply.status, b"")
                assert head.headers["Content-Type"] == reply.headers["Content-Type"]

    with_server(talk)


@pytest.mark.parametrize("path", sorted({operation.path for operation, _ in ROUTES}))
def test_other_methods_are_told_which_there_are(path: str) -> None:
    others = {"OPTIONS", "DELETE", "PATCH"} - {
        operation.method.upper() for operation, _ in ROUTES if operation.path == path
    }
    path = re.sub(r"\{\w+\}", NAME.rpartition("/")[2], path)

    def talk(urls: list[str]) -> list[Reply]:
        return [send(urls[0], method, path) for method in others]

    for reply in with_server(talk):
        assert reply.status == 405
        if not path.startswith("/v1/messages"):
            assert reply.error["code"] == "method_not_allowed"
        assert reply.headers["Allow"]


def test_the_page_for_people() -> None:
    page = ask("GET", "/", headers={"Host": "localhost:1"})
    text = page.body.decode()
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "curl http://localhost:1/v1/chat/completions" in text
    assert "Authorization" not in text
    assert all(part in text for part in (NAME, "Not ready", *(operation.path for operation, _ in ROUTES)))
    assert "src=" not in text


def test_the_page_trusts_nobody_and_names_the_key() -> None:
    headers = {"Host": "<script>", "Authorization": "Bearer key"}
    text = ask("GET", "/", headers=headers, host="0.0.0.0", api_keys=("key",)).body.decode()
    assert "<script>" not in text
    assert "Authorization: Bearer KEY" in text


def test_load_without_a_model() -> None:
    assert ask("GET", "/load").json == {"server_load": 0}


def test_ready(server: ServerProcess) -> None:
    assert server.get("/ready") == server.get("/health") == (200, {"status": "ok"})
    assert server.post("/ping", {}) == (200, {"status": "ok"})
    assert server.get("/load")[0] == 200


def test_tokens_of_a_text_there_and_back(server: ServerProcess) -> None:
    text = "Hé 北京<|im_end|>"
    status, there = server.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert there["tokens"][-1] == 2
    assert there["token_strs"][-1] == "<|im_end|>"
    assert there["max_model_len"] > 100
    assert server.post("/detokenize", {"tokens": there["tokens"]}) == (200, {"prompt": text})
    assert server.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    assert server.post("/tokenize", {"prompt": text})[1]["token_strs"] is None


def test_tokens_of_a_chat_are_those_that_a_completion_counts(server: ServerProcess) -> None:
    _, tokenized = server.post("/tokenize", {**QUESTION, "temperature": 0})
    _, answer = server.post("/v1/chat/completions", {**QUESTION, "max_tokens": 1})
    assert tokenized["count"] == answer["usage"]["prompt_tokens"]
    _, prompt = server.post("/detokenize", {"tokens": tokenized["tokens"]})
    assert prompt["prompt"].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    asked = {**QUESTION, "add_generation_prompt": False}
    assert server.post("/tokenize", asked)[1]["count"] < tokenized["count"]


def test_a_system_message_stays_where_it_is(server: ServerProcess) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": "three"},
    ]
    _, tokenized = server.post("/tokenize", {"messages": messages})
    _, prompt = server.post("/detokenize", {"tokens": tokenized["tokens"]})
    parts = ["<|im_start|>user\none", "<|im_start|>system\ntwo", "<|im_start|>user\nthree"]
    assert [prompt["prompt"].index(part) for part in parts] == sorted(map(prompt["prompt"].index, parts))


def test_an_answer_that_goes_on_with_a_message(server: ServerProcess) -> None:
    messages = [*QUESTION["messages"], {"role": "assistant", "content": "The capital of France is"}]
    status, answer = server.post(
        "/v1/chat/completions",
        {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 4},
    )
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].startswith(" Paris")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {**QUESTION, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {**QUESTION, "chat_template_kwargs": {"chat_template": "x"}}, None),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": [1], "suffix": "b"}, "suffix"),
        ("/v1/chat/completions", {**QUESTION, "chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_what_cannot_be_is_refused(server: ServerProcess, path: str, body: Any, param: str | None) -> None:
    status, answer = server.post(path, body)
    assert status == 400, answer
    if param is not None:
        assert answer["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_an_unknown_model_and_a_broken_body(server: ServerProcess, path: str) -> None:
    assert server.post(path, {"prompt": "x", "tokens": [], "model": "other"})[0] == 404
    assert server.post(path, b"{")[0] == 400
    assert server.post(path, b"[" * 10_000)[0] == 400


def test_a_requests_template_where_it_is_trusted(tmp_path: Path) -> None:
    model = tiny_folder.save(tmp_path / "tiny")
    trusting = {"METAL_SERVER_TRUST_REQUEST_CHAT_TEMPLATE": "true"}
    with ServerProcess(str(model), env=trusting) as server:
        server.ready()
        asked = {**QUESTION, "chat_template": "{{ messages[0].content }}|{{ mood }}"}
        _, tokenized = server.post("/tokenize", {**asked, "chat_template_kwargs": {"mood": "gay"}})
        assert server.post("/detokenize", {"tokens": tokenized["tokens"]})[1] == {"prompt": "Hi|gay"}
        loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        status, answer = server.post("/v1/chat/completions", {**QUESTION, "chat_template": loop})
        assert (status, answer["error"]["param"]) == (400, "chat_template")
        assert (
            server.post("/v1/chat/completions", json.dumps(QUESTION | {"max_tokens": 1}).encode())[0] == 200
        )
