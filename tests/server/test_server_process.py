"""Streams, disconnects, a full queue and stopping, against a real server process with the real model."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from fake_hub import FakeHub, Repository
from server_process import ServerProcess

QUESTION = {"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}
#: Runs until somebody ends it.
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@contextmanager
def posted(
    server: ServerProcess, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """The reply, still to be read; leaving hangs up."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    try:
        connection.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})}
        )
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each event, in order."""
    while line := response.readline():
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").decode().rstrip("\n")


def streamed(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with posted(server, path, {**body, "stream": True}) as response:
        assert response.status == 200
        *chunks, done = events(response)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def wait_for(condition: Callable[[], bool]) -> None:
    """Long enough for the slowest machine, and far less than an endless request takes."""
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_chat_stream_has_openais_shape(server: ServerProcess) -> None:
    chunks = streamed(server, "/v1/chat/completions", {**QUESTION, "stream_options": {"include_usage": True}})
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    opening, *deltas, closing, usage = chunks
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(delta["choices"][0]["delta"].keys() == {"content"} for delta in deltas)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (opening, *deltas))
    assert closing["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}
    assert usage["choices"] == []
    assert all("usage" not in chunk for chunk in chunks[:-1])

    status, whole = server.post("/v1/chat/completions", QUESTION)
    assert status == 200
    TypeAdapter(ChatCompletion).validate_python(whole, strict=True)
    joined = "".join(delta["choices"][0]["delta"]["content"] for delta in deltas)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": joined, "refusal": None}
    assert whole["choices"][0]["logprobs"] is None
    assert whole["usage"] == usage["usage"]


def test_a_completion_stream_has_openais_shape(server: ServerProcess) -> None:
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    chunks = streamed(server, "/v1/completions", body)
    *deltas, closing = chunks
    for chunk in deltas:
        assert chunk["choices"][0].keys() == {"index", "text", "finish_reason", "logprobs"}
    assert closing["choices"] == [{"index": 0, "text": "", "finish_reason": "length", "logprobs": None}]
    _, whole = server.post("/v1/completions", body)
    TypeAdapter(Completion).validate_python(whole, strict=True)
    assert whole["choices"][0]["text"] == "".join(delta["choices"][0]["text"] for delta in deltas)
    assert whole["usage"]["completion_tokens"] == 8


def test_usage_can_be_followed(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, *chunks = streamed(server, "/v1/chat/completions", {**QUESTION, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_an_error_before_the_first_token_is_no_stream(server: ServerProcess) -> None:
    with posted(server, "/v1/completions", {"prompt": [], "stream": True}) as response:
        assert response.status == 400
        assert json.load(response)["error"]["message"] == "the prompt is empty"


def test_the_log_counts_tokens(server: ServerProcess) -> None:
    server.post("/v1/completions", {"prompt": [504, 3575, 282], "max_tokens": 2, "ignore_eos": True})
    wait_for(lambda: "POST /v1/completions 200 3+2 tokens" in server.log)


@pytest.fixture(scope="module")
def small_queue(smollm2_path: Path) -> Iterator[ServerProcess]:
    """A server that holds one request at once: the next gets in only when the first has been let go."""
    with ServerProcess(str(smollm2_path), env={"METAL_SERVER_MAX_QUEUED": "1"}) as process:
        yield process.ready()


def is_free(server: ServerProcess) -> bool:
    return server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_full_queue_says_when_to_come_back(small_queue: ServerProcess) -> None:
    with posted(small_queue, "/v1/completions", ENDLESS) as running:
        assert next(events(running))
        with posted(small_queue, "/v1/completions", {"prompt": "x"}) as refused:
            assert refused.status == 429
            assert int(refused.headers["Retry-After"]) > 0
            assert json.load(refused)["error"]["code"] == "rate_limit_exceeded"
    wait_for(lambda: is_free(small_queue))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place(small_queue: ServerProcess, stream: bool) -> None:
    gone_before = small_queue.log.count(" 499 ")
    with posted(small_queue, "/v1/completions", ENDLESS) if stream else unanswered(small_queue):
        assert not is_free(small_queue)
    wait_for(lambda: is_free(small_queue))
    wait_for(lambda: small_queue.log.count(" 499 ") == gone_before + 1)


def test_a_client_that_hangs_up_in_prefill_frees_its_place(small_queue: ServerProcess) -> None:
    with unanswered(small_queue, prompt="word " * 4000):
        wait_for(lambda: not is_free(small_queue))
    wait_for(lambda: is_free(small_queue))


@contextmanager
def unanswered(server: ServerProcess, **fields: Any) -> Iterator[None]:
    """A request whose reply is never awaited."""
    url = urlsplit(server.url)
    body = json.dumps({**ENDLESS, "stream": False, **fields}).encode()
    with socket.create_connection((url.hostname or "", url.port or 0)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_for(lambda: not is_free(server))
        yield


def test_stopping_lets_streams_finish_and_refuses_new_requests(smollm2_path: Path) -> None:
    with ServerProcess(str(smollm2_path), env={}) as process:
        process.ready()
        body = {**ENDLESS, "max_tokens": 60}
        with posted(process, "/v1/completions", body) as running:
            chunks = events(running)
            next(chunks)
            process.process.send_signal(signal.SIGTERM)
            wait_for(lambda: process.get("/health")[1]["status"] == "draining")
            status, refused = process.post("/v1/completions", {"prompt": "x"})
            assert (status, refused["error"]["code"]) == (503, "service_unavailable")
            *_, closing, done = chunks
        assert json.loads(closing)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert process.process.wait(timeout=60) == 0
        assert "waiting for 1 request to finish" in process.log
        assert "Traceback" not in process.log


def test_stopping_ends_a_download(tmp_path: Path) -> None:
    hub = FakeHub()
    # The hub's client hands on 10 MiB at a time.
    weights = bytes(30 * 1024 * 1024)
    hub.repositories["org/large"] = Repository(
        {"config.json": b"{}", "model.safetensors": weights}, hold_after={"model.safetensors": 1}
    )
    with hub.serving() as endpoint:
        env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        with ServerProcess("org/large", env=env) as process:
            assert hub.held.acquire(timeout=60)
            process.process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses_connections(process))
            hub.released.set()
            assert process.process.wait(60) == 0
        assert "Traceback" not in process.log
    assert "model.safetensors" in hub.fetched()
    assert not list(tmp_path.rglob("model.safetensors"))


def refuses_connections(process: ServerProcess) -> bool:
    url = urlsplit(process.url)
    try:
        socket.create_connection((url.hostname, url.port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_second_interrupt_does_not_wait(smollm2_path: Path) -> None:
    with ServerProcess(str(smollm2_path), env={}) as process:
        process.ready()
        with posted(process, "/v1/completions", ENDLESS) as running:
            assert next(events(running))
            process.process.send_signal(signal.SIGINT)
            wait_for(lambda: process.get("/health")[1]["status"] == "draining")
            assert process.stop(signal.SIGINT) == 130
        assert "Traceback" not in process.log


def test_a_requests_own_time_limit(small_queue: ServerProcess) -> None:
    limited = {**ENDLESS, "timeout": 0.3}
    with posted(small_queue, "/v1/completions", {**limited, "stream": False}) as response:
        assert response.status == 408
        assert response.headers["x-should-retry"] == "false"
        error = json.load(response)["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    wait_for(lambda: is_free(small_queue))
    with posted(small_queue, "/v1/completions", limited) as response:
        assert response.status == 200
        *_, error, done = events(response)
    assert json.loads(error)["error"]["code"] == "deadline_exceeded"
    assert done == "[DONE]"
    wait_for(lambda: is_free(small_queue))
    assert small_queue.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "timeout": 1e300})[0] == 200


def test_a_reply_bears_the_id_of_its_request(server: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for _ in range(2):
        status, answer = server.post("/v1/completions", body, {"X-Request-Id": "trace-7"})
        assert (status, answer["id"]) == (200, "cmpl-trace-7")
    with posted(server, "/v1/completions", body) as response:
        assert json.load(response)["id"] == f"cmpl-{response.headers['X-Request-Id']}"


def test_requests_of_one_id_do_not_meet(server: ServerProcess) -> None:
    headers = {"X-Request-Id": "same"}
    with posted(server, "/v1/completions", ENDLESS, headers) as first:
        chunks = events(first)
        next(chunks)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers)[0] == 200
        assert json.loads(next(chunks))["id"] == "cmpl-same"


def test_requests_at_once_are_bounded(smollm2_path: Path) -> None:
    env = {"METAL_SERVER_MAX_CONCURRENT_REQUESTS": "1", "METAL_SERVER_REQUEST_TIMEOUT": "60"}
    with ServerProcess(str(smollm2_path), env=env) as process:
        process.ready()
        with posted(process, "/v1/completions", ENDLESS) as running:
            assert next(events(running))
            with posted(process, "/v1/completions", {"prompt": "x"}) as refused:
                assert refused.status == 429
                assert int(refused.headers["Retry-After"]) > 0
                assert "at once" in json.load(refused)["error"]["message"]
        wait_for(lambda: is_free(process))


def comments(response: http.client.HTTPResponse) -> Iterator[str]:
    """All comments of a stream, which is read to its end."""
    while line := response.readline():
        if line.startswith(b": "):
            yield line.removeprefix(b": ").decode().rstrip("\n")


def test_progress_is_told_by_comments(server: ServerProcess) -> None:
    body = {**ENDLESS, "prompt": "word " * 600, "max_tokens": 1, "cache_salt": "progress"}
    with posted(
        server, "/v1/completions", {**body, "stream_options": {"include_progress": True}}
    ) as response:
        # On a slow machine there are keep-alives among them.
        progress = [each for each in comments(response) if each.startswith("progress ")]
    told = [json.loads(each.removeprefix("progress ")) for each in progress]
    assert len(told) > 1
    assert all((each["index"], each["queue_place"]) == (0, 0) for each in told)
    prefilled = [each["prefilled_tokens"] for each in told]
    assert prefilled == sorted(set(prefilled))
    assert told[0]["prompt_tokens"] >= max(prefilled) > 0


def test_the_place_in_the_queue_is_told(smollm2_path: Path) -> None:
    with ServerProcess(str(smollm2_path), env={"METAL_ENGINE_MAX_NUM_SEQS": "1"}) as process:
        process.ready()
        asked = {**ENDLESS, "stream_options": {"include_progress": True}, "max_tokens": 1}
        with ExitStack() as others:
            running = others.enter_context(posted(process, "/v1/completions", ENDLESS))
            assert next(events(running))
            with posted(process, "/v1/completions", asked) as waiting:
                first = waiting.readline()
                others.close()
                rest = waiting.read()
        assert first.startswith(b": progress ")
        assert json.loads(first.removeprefix(b": progress "))["queue_place"] == 1
        assert rest.endswith(b"data: [DONE]\n\n")


def test_openais_client_sees_no_progress(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="smollm2",
            messages=QUESTION["messages"],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True, "include_progress": True},
        )
        assert all(isinstance(chunk, ChatCompletionChunk) and chunk.id for chunk in chunks)
