"""What the server says before any model is asked: errors, keys, hosts, origins, ids."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import compression_utils
from in_process import MODEL, NAME, Reply, ask, send, with_server

from keg import stamp
from vllm_metal import __version__
from vllm_metal.server import bodies, run

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a secret question"}]}
BOTH = pytest.mark.parametrize("path", [CHAT, "/v1/completions"])


def test_version() -> None:
    reply = ask("GET", "/version")
    assert (reply.status, reply.json) == (200, {"version": __version__, "pid": os.getpid()})


def test_version_names_the_code_that_runs_in_a_venv_of_metal_setup(tmp_path: Path, monkeypatch) -> None:
    stamp(tmp_path, package_sha256="5f2c")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert ask("GET", "/version").json["package_sha256"] == "5f2c"


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_about_the_server(path: str) -> None:
    reply = ask("GET", path)
    assert (reply.status, reply.json) == (200, {"status": "ok"})


def test_readiness_tells_why_there_is_no_model() -> None:
    reply = ask("GET", "/ready")
    assert reply.status == 503
    assert int(reply.headers["Retry-After"]) > 0
    assert reply.json["status"] in ("loading", "failed")


def test_models_are_listed_and_found_by_a_name_with_slashes() -> None:
    def talk(urls: list[str]) -> None:
        listed = send(urls[0], "GET", "/v1/models")
        [model] = listed.json["data"]
        assert listed.json["object"] == "list"
        assert model == {
            "object": "model",
            "id": NAME,
            "created": model["created"],
            "owned_by": "vllm-metal",
            "max_model_len": None,
            "parent": None,
            "kind": None,
            "state": model["state"],
        }
        assert model["state"] in ("loading", "failed")
        found = send(urls[0], "GET", f"/v1/models/{model['id']}").json
        assert found | {"state": model["state"]} == model
        missing = send(urls[0], "GET", "/v1/models/org/other")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert "`org/other`" in missing.error["message"]

    with_server(talk)


def test_without_a_model_requests_are_told_when_to_come_back() -> None:
    reply = ask("POST", CHAT, BODY)
    assert (reply.status, reply.error["code"]) == (503, "service_unavailable")
    assert MODEL in reply.error["message"]
    assert int(reply.headers["Retry-After"]) > 0


def test_an_unknown_model_is_named() -> None:
    reply = ask("POST", CHAT, {**BODY, "model": "other"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert "`other`" in reply.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "part"),
    [
        ("GET", "/v1/nothing", 404, "not_found", "/v1/nothing"),
        ("GET", CHAT, 405, "method_not_allowed", "POST"),
        ("DELETE", "/v1/models", 405, "method_not_allowed", "GET"),
    ],
)
def test_wrong_routes(method: str, path: str, status: int, code: str, part: str) -> None:
    reply = ask(method, path)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert part in reply.error["message"]
    assert ("Allow" in reply.headers) == (status == 405)


@BOTH
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'{"a": "\xff"}'])
def test_a_body_that_is_no_json_object(path: str, body: bytes) -> None:
    reply = ask("POST", path, body, {"Content-Type": "application/json"})
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


@BOTH
def test_a_body_that_is_not_encoded_as_it_says(path: str) -> None:
    reply = ask("POST", path, BODY, {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert "`Content-Encoding`" in reply.error["message"]


GZIPPED = gzip.compress(json.dumps(BODY).encode())


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", GZIPPED),
        ("GZip", GZIPPED),
        ("deflate", zlib.compress(json.dumps(BODY).encode())),
        ("identity", json.dumps(BODY).encode()),
        ("", json.dumps(BODY).encode()),
    ],
)
def test_encodings_that_are_known(encoding: str, content: bytes) -> None:
    assert ask("POST", CHAT, content, {"Content-Encoding": encoding}).status == 503


@pytest.mark.parametrize("encoding", ["compress", "x-gzip", "gzip, gzip", "\xe9", "br", "zstd"])
def test_encodings_that_are_not(encoding: str) -> None:
    """Of those that need a package aiohttp says so before there is a request."""
    if {"br": compression_utils.HAS_BROTLI, "zstd": compression_utils.HAS_ZSTD}.get(encoding):
        pytest.skip("there is a package for it")
    reply = ask("POST", CHAT, GZIPPED, {"Content-Encoding": encoding})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert reply.error["message"].startswith(
        "the body's `Content-Encoding` must be `gzip` or `deflate`, not "
    )


@pytest.mark.parametrize("content", [GZIPPED[:-12], GZIPPED[:10] + GZIPPED[12:], GZIPPED[:-8] + bytes(8)])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_damaged_body(encoding: str, content: bytes) -> None:
    if encoding == "deflate":
        content = content[10:]
    assert ask("POST", CHAT, content, {"Content-Encoding": encoding}).error["type"] == "invalid_request_error"


def test_a_body_that_is_large_once_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decoded no further than to the limit, whatever it would come to."""
    bomb = gzip.compress(bytes(1 << 26))
    num_decoded = []
    decompress = compression_utils.ZLibDecompressor.decompress_sync

    def counted(*args: Any, **kwargs: Any) -> bytes:
        decoded = decompress(*args, **kwargs)
        num_decoded.append(len(decoded))
        return decoded

    monkeypatch.setattr(compression_utils.ZLibDecompressor, "decompress_sync", counted)
    reply = ask("POST", CHAT, bomb, {"Content-Encoding": "gzip"}, max_body_bytes=100_000)
    assert len(bomb) < 100_000
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert 100_000 < sum(num_decoded) < 1 << 23


def send_late(path: str, headers: bytes, body: bytes) -> bytes:
    """What the server says until it closes, when a body comes once it has begun to wait for it."""

    def talk(urls: list[str]) -> bytes:
        url = urlsplit(urls[0])
        with socket.create_connection((url.hostname, url.port), timeout=30) as sock:
            sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n".encode())
            sock.sendall(headers + b"\r\n\r\n")
            assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(body)
            return b"".join(iter(lambda: sock.recv(1000), b""))

    return with_server(talk)


@BOTH
def test_a_body_that_never_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_WAIT_S", 0.2)
    answer = send_late(path, b"Content-Length: 50", b"{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


@BOTH
@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (b"Transfer-Encoding: chunked", b"no chunk\r\n"),
        (b"Transfer-Encoding: chunked", b"2\r\n{}\r\nno chunk\r\n"),
        (b"Content-Encoding: gzip\r\nContent-Length: 9", b"not gzip!"),
        (b"Content-Encoding: deflate\r\nContent-Length: 9", zlib.compress(b"{}" * 100)[:9]),
    ],
)
def test_a_body_whose_rest_is_malformed(path: str, headers: bytes, body: bytes) -> None:
    """It is refused at once, and in one answer."""
    answer = send_late(path, headers, body)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert bodies.BADLY_ENCODED.encode() in answer


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "text/\xe9"])
def test_a_body_of_another_type(content_type: str) -> None:
    reply = ask("POST", CHAT, b"{}", {"Content-Type": content_type})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert content_type.split("/")[0] in reply.error["message"]


def test_a_charset_or_no_content_type_is_fine() -> None:
    def talk(urls: list[str]) -> None:
        for headers in ({"Content-Type": "application/json; charset=utf-8"}, {}):
            assert send(urls[0], "POST", CHAT, b"{}", headers).error["param"] == "messages"

    with_server(talk)


def test_a_body_over_the_limit() -> None:
    def talk(urls: list[str]) -> None:
        large = send(urls[0], "POST", CHAT, {**BODY, "user": "x" * 2000})
        assert (large.status, large.error["code"]) == (413, "request_too_large")
        assert "2000 bytes" in large.error["message"]
        assert send(urls[0], "POST", CHAT, {**BODY, "n": 0}).status == 400

    with_server(talk, max_body_bytes=2000)


@BOTH
def test_a_field_is_refused_before_the_model_is_awaited(path: str) -> None:
    reply = ask("POST", path, {**BODY, "prompt": "x", "top_p": 0})
    assert (reply.status, reply.error["param"]) == (400, "top_p")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "first"}, 401),
        ({"Authorization": "Bearer \xe9"}, 401),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer second"}, 200),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    reply = ask("GET", "/v1/models", headers=headers, api_keys=("first", "second"))
    assert reply.status == status
    if status == 401:
        assert reply.error["code"] == "invalid_api_key"
        assert reply.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/v1/nothing", CHAT])
def test_all_but_probes_need_a_key(path: str) -> None:
    assert ask("GET", path, api_keys=("key",)).status == 401


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/ping", 200), ("/ready", 503)])
def test_probes_need_no_key_and_stay_out_of_the_log(
    path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "vllm_metal")
    assert ask("GET", path, api_keys=("key",)).status == status
    [line] = [record for record in caplog.records if f"GET {path} {status}" in record.message]
    assert line.levelno == logging.DEBUG


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("host.docker.internal:8000", 200),
        ("mac.lan:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("evil@localhost", 403),
        ("", 403),
    ],
)
def test_hosts_on_loopback(host: str, status: int) -> None:
    reply = ask("GET", "/version", headers={"Host": host}, allowed_hosts=("Mac.lan",))
    assert reply.status == status
    if status == 403:
        assert reply.error["code"] == "forbidden"


def test_any_host_elsewhere_than_on_loopback() -> None:
    assert ask("GET", "/version", headers={"Host": "mac.example"}, host="0.0.0.0").status == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 400),
        ("http://127.0.0.1", 400),
        ("http://[::1]:5173", 400),
        ("https://app.example", 400),
        ("https://evil.example", 403),
        ("http://app.example", 403),
        ("https://localhost.evil.example", 403),
        ("http://[bad", 403),
        ("null", 403),
    ],
)
def test_origins_of_a_post(origin: str, status: int) -> None:
    reply = ask("POST", CHAT, {}, headers={"Origin": origin}, allowed_origins=("https://app.example",))
    assert reply.status == status
    readable = reply.headers["Access-Control-Allow-Origin"]
    assert readable == (origin if origin == "https://app.example" else None)


def test_a_preflight_of_an_allowed_origin() -> None:
    headers = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    # Browsers send no key with a preflight.
    reply = ask("OPTIONS", CHAT, headers=headers, allowed_origins=("https://app.example",), api_keys=("key",))
    assert reply.status == 204
    assert reply.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert reply.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert "POST" in reply.headers["Access-Control-Allow-Methods"]


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000"])
def test_a_preflight_of_any_other_origin(origin: str) -> None:
    reply = ask("OPTIONS", CHAT, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert reply.status in (403, 405)
    assert "Access-Control-Allow-Origin" not in reply.headers


def test_request_ids_are_kept_if_fit() -> None:
    def talk(urls: list[str]) -> None:
        def id_for(given: str) -> str | None:
            return send(urls[0], "GET", "/nothing", headers={"X-Request-Id": given}).headers["X-Request-Id"]

        assert id_for("trace-1") == "trace-1"
        for unfit in ("x" * 129, "caf\xe9", ""):
            assert id_for(unfit) not in (unfit, None)
        assert id_for("") != id_for("")

    with_server(talk)


def test_an_expectation_that_cannot_be_met() -> None:
    reply = ask("GET", "/version", headers={"Expect": "the impossible"})
    assert (reply.status, reply.error["code"]) == (417, "expectation_failed")
    assert "the impossible" in reply.error["message"]
    assert reply.headers["X-Request-Id"]
    assert ask("GET", "/nothing", headers={"Expect": "the impossible"}).error["code"] == "expectation_failed"


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"])
def test_a_connection_that_never_asks_is_ended(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "IDLE_S", 0.1)

    def talk(urls: list[str]) -> bytes:
        url = urlsplit(urls[0])
        with socket.create_connection((url.hostname, url.port), timeout=30) as sock:
            sock.sendall(head)
            return sock.recv(100)

    assert with_server(talk) == b""


def test_the_log_tells_of_requests_but_not_what_they_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "vllm_metal")
    headers = {"Authorization": "Bearer a-secret-key"}
    ask("POST", f"{CHAT}?a=%0Ab", {**BODY, "n": 0}, headers=headers, api_keys=("a-secret-key",))
    [line] = [record.message for record in caplog.records if CHAT in record.message]
    assert line.startswith(f"POST {CHAT} 400 ")
    assert "secret" not in caplog.text


def test_bytes_that_are_not_http_are_refused_and_harm_nobody() -> None:
    def talk(urls: list[str]) -> None:
        url = urlsplit(urls[0])
        assert url.hostname is not None
        with socket.create_connection((url.hostname, url.port), timeout=30) as sock:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.")
        assert send(urls[0], "GET", "/version").status == 200

    with_server(talk)


def test_both_loopback_addresses_answer() -> None:
    def talk(urls: list[str]) -> None:
        assert [urlsplit(url).hostname for url in urls] == ["127.0.0.1", "::1"]
        assert [send(url, "GET", "/version").status for url in urls] == [200, 200]

    with_server(talk)


def test_a_unix_socket_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "metal.sock"

    def talk(urls: list[str]) -> None:
        assert urls == [f"unix:{path}"]
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")

    with_server(talk, uds=str(path))
    assert not path.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", certificate, "-keyout", key],
        check=True,
        capture_output=True,
    )

    def talk(urls: list[str]) -> None:
        assert urls[0].startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(urlsplit(urls[0]).netloc, timeout=30, context=trusting)
        connection.request("GET", "/version")
        with connection.getresponse() as response:
            assert response.status == 200
        connection.close()

    with_server(talk, ssl_certfile=str(certificate), ssl_keyfile=str(key))


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"GET\r\n\r\n", "this is no HTTP request: "),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", "this is no HTTP request: "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"x" * 20_000 + b"\r\n\r\n", "8190"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", "8190"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", "Content-Length"),
    ],
)
def test_what_is_no_http_is_refused_in_the_usual_shape(head: bytes, part: str) -> None:
    def talk(urls: list[str]) -> bytes:
        url = urlsplit(urls[0])
        with socket.create_connection((url.hostname, url.port), timeout=30) as sock:
            sock.sendall(head)
            answer = b""
            # Bytes that were never read make the server reset the connection behind its answer.
            with suppress(ConnectionResetError):
                while received := sock.recv(65_536):
                    answer += received
            return answer

    head, _, body = with_server(talk).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert b"Content-Type: application/json" in head
    assert b"X-Request-Id: " in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert part in error["message"]
    assert "\n" not in error["message"]


def test_a_connection_is_kept_for_the_next_request() -> None:
    def talk(urls: list[str]) -> None:
        connection = http.client.HTTPConnection(urlsplit(urls[0]).netloc, timeout=30)
        for method, path, status in (("GET", "/version", 200), ("POST", CHAT, 400), ("GET", "/nothing", 404)):
            connection.request(method, path, "{}" if method == "POST" else None)
            sock = connection.sock
            with connection.getresponse() as response:
                response.read()
                assert (response.status, connection.sock) == (status, sock)
        connection.close()

    with_server(talk)


def test_each_key_has_its_own_rate() -> None:
    def talk(urls: list[str]) -> None:
        def post(key: str, path: str = CHAT) -> Reply:
            return send(urls[0], "POST", path, {}, {"Authorization": f"Bearer {key}"})

        first, second, refused = post("one"), post("one"), post("one")
        assert [first.status, second.status, refused.status] == [400, 400, 429]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.error["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        assert post("two").status == 400
        assert post("three").status == 401
        # What makes no work is not counted.
        assert post("one", "/ping").status == 200
        headers = {"Authorization": "Bearer one"}
        assert send(urls[0], "GET", "/v1/models", headers=headers).status == 200

    with_server(talk, max_requests_per_minute=2, api_keys=("one", "two"))


def test_without_keys_all_share_one_rate() -> None:
    def talk(urls: list[str]) -> None:
        statuses = [
            send(urls[0], "POST", CHAT, {}, {"Authorization": f"Bearer {key}"}).status for key in "ab"
        ]
        assert statuses == [400, 429]

    with_server(talk, max_requests_per_minute=1)


def test_rates_are_not_told_where_there_are_none() -> None:
    assert "x-ratelimit-limit-requests" not in ask("POST", CHAT, {}).headers
