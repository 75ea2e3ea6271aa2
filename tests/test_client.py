from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripted_server import DEADLINE_S, Script, chunk, event, refuses, replies, serving, streams, streams_raw
from vllm_metal.client import ChatDelta, Client, Usage, server_url, sse_events
from vllm_metal.errors import (
    ConfigError,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InsufficientMemory,
    InvalidRequest,
    MetalError,
    ModelNotFound,
    PromptTooLong,
    ServerUnreachable,
)
from vllm_metal.settings import ServerConfig

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        yield script


# Server-sent events

line = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))
noise = st.one_of(
    line.map(lambda text: f":{text}"), st.sampled_from(["id: 7", "retry: 10", "event: x", "dat"])
)


@given(
    events=st.lists(st.lists(line, min_size=1)),
    comments=st.lists(noise),
    end=st.sampled_from(["\n", "\r", "\r\n"]),
    spaced=st.booleans(),
    data=st.data(),
)
def test_events_are_the_same_however_the_stream_is_cut(
    events: list[list[str]], comments: list[str], end: str, spaced: bool, data: st.DataObject
) -> None:
    # Without the optional space, a value that begins with one would lose it.
    field = "data: " if spaced or any(text.startswith(" ") for lines in events for text in lines) else "data:"
    lines = [text for lines in events for text in [*(field + part for part in lines), *comments, ""]]
    stream = "".join(text + end for text in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert list(sse_events(pieces)) == ["\n".join(lines) for lines in events]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\r\n\r\n", b"\r\n\r"])
def test_an_event_is_given_before_more_is_read(end: bytes) -> None:
    def stream() -> Iterator[bytes]:
        yield b"data: one" + end
        raise AssertionError("read on")

    assert next(sse_events(stream())) == "one"


def test_an_unfinished_event_is_dropped() -> None:
    assert list(sse_events([b"data: one\n\nda", b"ta: two\n"])) == ["one"]


# Chat


def test_chat_streams_the_answer_and_its_usage(server: Script) -> None:
    server.on_chat(streams("Grüße", ", ", "世界 🌍", prompt_tokens=31))
    deltas = list(Client(server.url).chat(HELLO, model="smollm2", temperature=0, max_tokens=8))
    assert "".join(delta.text for delta in deltas) == "Grüße, 世界 🌍"
    assert deltas[-2:] == [ChatDelta(finish_reason="stop"), ChatDelta(usage=Usage(31, 3))]
    request = server.next_chat()
    assert request.method == "POST"
    assert request.body == {
        "model": "smollm2",
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 8,
    }
    assert request.headers["Authorization"] is None


def test_the_model_may_be_left_out_and_the_key_is_sent(server: Script) -> None:
    server.on_chat(streams("Hi"))
    list(Client(server.url, api_key="sk-1").chat(HELLO))
    request = server.next_chat()
    assert "model" not in request.body
    assert request.headers["Authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_in_v1(server: Script, suffix: str) -> None:
    client = Client(server.url + suffix)
    assert client.url == server.url
    assert client.models() == [{"id": "smollm2", "object": "model"}]


def test_the_url_may_have_a_path(server: Script) -> None:
    server.on("/models/metal/ready", replies({"status": "ok"}))
    assert Client(server.url + "/models/metal/v1").health() == {"status": "ok"}


def test_a_unix_socket_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A relative path, because the whole one may be too long for a socket.
    monkeypatch.chdir(tmp_path)
    with serving(socket=Path("metal.sock")) as script:
        script.on_chat(streams("Hi", "!"))
        assert "".join(delta.text for delta in Client("unix:metal.sock").chat(HELLO)) == "Hi!"
    with pytest.raises(ServerUnreachable, match=r"no server answers at unix:gone\.sock"):
        Client("unix:gone.sock").models()


def test_https_wants_a_certificate_it_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openssl = shutil.which("openssl") or pytest.skip("no openssl to make a certificate with")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(tls=context) as script:
        with pytest.raises(ServerUnreachable, match="no trusted connection") as refused:
            Client(script.url).models()
        assert "SSL_CERT_FILE" in (refused.value.hint or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert Client(script.url).models()[0]["id"] == "smollm2"


def test_closing_the_stream_closes_the_connection(server: Script) -> None:
    server.on_chat(server.hangs_after("One", " two"))
    stream = Client(server.url).chat(HELLO)
    assert next(stream).text == "One"
    stream.close()
    assert server.disconnected.wait(DEADLINE_S)


# Health and models


def test_health(server: Script) -> None:
    server.on(
        "/ready",
        replies({"status": "loading", "stage": "loading weights"}, 503, Retry_After="3"),
        replies({"status": "ok"}),
        replies(""),
    )
    client = Client(server.url)
    with pytest.raises(EngineUnavailable, match="loading weights") as loading:
        client.health()
    assert loading.value.retry_after_s == 3
    assert client.health() == {"status": "ok"}
    assert client.health() == {}


# Errors


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, InvalidRequest),
        (400, "context_length_exceeded", PromptTooLong),
        (404, "model_not_found", ModelNotFound),
        (507, "insufficient_memory", InsufficientMemory),
        (401, "invalid_api_key", MetalError),
        (403, None, InvalidRequest),
        (413, None, InvalidRequest),
        (429, None, EngineBusy),
        (500, None, EngineError),
        (503, None, EngineUnavailable),
    ],
)
def test_an_error_reply_becomes_our_error(
    server: Script, status: int, code: str | None, kind: type[MetalError]
) -> None:
    server.on_chat(refuses(status, "that will not do", code=code, param="messages"))
    with pytest.raises(MetalError) as refused:
        next(Client(server.url).chat(HELLO))
    assert type(refused.value) is kind
    assert refused.value.message == "that will not do"
    if isinstance(refused.value, InvalidRequest):
        assert refused.value.param == "messages"
    if status == 401:
        assert "--api-key" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [({"Retry_After": "7"}, 7), ({"Retry_After": "0"}, 1), ({"Retry_After": "Mon"}, 1), ({}, 1)],
)
def test_retry_after(server: Script, header: dict[str, str], seconds: int) -> None:
    server.on_chat(refuses(429, "the queue is full", **header))
    with pytest.raises(EngineBusy) as busy:
        next(Client(server.url).chat(HELLO))
    assert busy.value.retry_after_s == seconds


@pytest.mark.parametrize("body", ["<html>Bad Gateway</html>", "[]", "", "{}"])
def test_a_refusal_in_another_shape_tells_its_status(server: Script, body: str) -> None:
    server.on_chat(replies(body, 502))
    with pytest.raises(EngineError, match=rf"{server.url} answered 502 Bad Gateway"):
        next(Client(server.url).chat(HELLO))


def test_a_refusal_may_be_a_bare_string(server: Script) -> None:
    server.on("/v1/models", replies({"error": "not here"}, 404))
    with pytest.raises(InvalidRequest, match="not here"):
        Client(server.url).models()


@pytest.mark.parametrize(("code", "kind"), [(None, EngineError), ("kv", EngineError), (400, InvalidRequest)])
def test_an_error_in_mid_stream_is_raised(server: Script, code: object, kind: type[MetalError]) -> None:
    error = {
        "error": {"message": "out of\x1b[2J memory\n", "type": "server_error", "param": None, "code": code}
    }
    server.on_chat(streams_raw(event(chunk("One")), event(error), b"data: [DONE]\n\n"))
    stream = Client(server.url).chat(HELLO)
    assert next(stream).text == "One"
    with pytest.raises(MetalError) as failed:
        next(stream)
    assert type(failed.value) is kind
    assert failed.value.message == "out of [2J memory "


@pytest.mark.parametrize("complete", [True, False])
def test_a_stream_that_breaks_off_is_an_error(server: Script, complete: bool) -> None:
    server.on_chat(streams_raw(event(chunk("One")), complete=complete))
    stream = Client(server.url).chat(HELLO)
    assert next(stream).text == "One"
    with pytest.raises(ServerUnreachable, match="broke off"):
        next(stream)


def test_a_reply_that_is_no_json_object_is_an_error(server: Script) -> None:
    server.on_chat(streams_raw(b"data: [1]\n\n"))
    with pytest.raises(EngineError, match="other than a JSON object"):
        next(Client(server.url).chat(HELLO))


def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ServerUnreachable) as refused:
            next(Client(url + "/v1").chat(HELLO))
    assert refused.value.message == f"no server answers at {url}"
    assert "`metal serve`" in (refused.value.hint or "")
    assert "`metal chat --local`" in (refused.value.hint or "")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "", "ftp://x", "http://", "http://x:port", "unix:", "http://[::1"]
)
def test_a_bad_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a server's URL"):
        Client(url)


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_bad_key_is_told(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        Client(api_key=key)


@pytest.mark.parametrize(
    ("server", "url"),
    [
        (ServerConfig(), "http://127.0.0.1:8000"),
        (ServerConfig(host="0.0.0.0", port=1), "http://127.0.0.1:1"),
        (ServerConfig(host="::"), "http://127.0.0.1:8000"),
        (ServerConfig(host="::1"), "http://[::1]:8000"),
        (ServerConfig(host="mac.local", ssl_certfile="c.pem"), "https://mac.local:8000"),
        (ServerConfig(uds="/run/metal.sock"), "unix:/run/metal.sock"),
    ],
)
def test_server_url(server: ServerConfig, url: str) -> None:
    assert server_url(server) == url
    assert Client(url).url == url


@pytest.mark.parametrize(
    ("body", "message"),
    [({"temperature": float("nan")}, "infinite or not a number"), ({"user": "\udcff"}, "not valid Unicode")],
)
def test_what_json_cannot_say_is_told_before_it_is_sent(
    server: Script, body: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        next(Client(server.url).chat(HELLO, **body))
