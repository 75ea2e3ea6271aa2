"""A real HTTP server on a free loopback port (or socket) that answers as the test scripts it."""

from __future__ import annotations

import json
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

DEADLINE_S = 20


@dataclass
class Received:
    method: str
    path: str
    headers: Any
    body: Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "vllm-metal/0.0.0"

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: Any) -> None:
        script = self.server.script
        script.received.put(Received(self.command, self.path, self.headers, body))
        answers = script.answers[self.path]
        answer = answers.popleft() if len(answers) > 1 else answers[0]
        self.close_connection = True
        with suppress(ConnectionError):  # the client may leave at any byte of an answer
            answer(self)

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, *_: object) -> None:
        pass


Answer = Callable[[Handler], None]


class Script:
    """`answers` maps a path to what it replies, in turn; the last one stays."""

    def __init__(self) -> None:
        self.url = ""
        self.received: SimpleQueue[Received] = SimpleQueue()
        self.disconnected = threading.Event()
        self.answers: dict[str, deque[Answer]] = {}
        self.on("/v1/models", replies({"object": "list", "data": [{"id": "smollm2", "object": "model"}]}))

    def on(self, path: str, *answers: Answer) -> None:
        self.answers[path] = deque(answers)

    def on_chat(self, *answers: Answer) -> None:
        self.on("/v1/chat/completions", *answers)

    def next_chat(self) -> Received:
        """The next chat request that arrives, or has arrived."""
        while (received := self.received.get(timeout=DEADLINE_S)).path != "/v1/chat/completions":
            pass
        return received

    def hangs_after(self, *texts: str) -> Answer:
        """Streams `texts`, then nothing until the client goes away."""

        def answer(handler: Handler) -> None:
            try:
                handler.begin_events()
                for text in texts:
                    handler.send_chunk(event(chunk(text)))
                gone = handler.connection.recv(1) == b""
            except ConnectionError:  # a client that leaves with bytes unread resets the connection
                gone = True
            if gone:
                self.disconnected.set()

        return answer


def replies(body: Any, status: int = 200, **headers: str) -> Answer:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()

    def answer(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def refuses(
    status: int, message: str, *, code: Any = None, param: str | None = None, **headers: str
) -> Answer:
    error = {"message": message, "type": "some_error", "param": param, "code": code}
    return replies({"error": error}, status, **headers)


class Meanwhile:
    """Each time that it is asked for its status, the server tells the next of `stages`: its models then."""

    def __init__(self, script: Script, *stages: list[dict[str, Any]]) -> None:
        self._seen = threading.Event()
        statuses = [replies({"uptime_s": 1, "models": models}) for models in stages]
        script.on("/admin/status", *statuses, self._last(statuses[-1]))

    def _last(self, answer: Answer) -> Answer:
        def last(handler: Handler) -> None:
            answer(handler)
            self._seen.set()

        return last

    def then(self, answer: Answer) -> Answer:
        """`answer`, once all of them have been told, and the last one twice."""

        def later(handler: Handler) -> None:
            assert self._seen.wait(DEADLINE_S)
            answer(handler)

        return later


def streams_raw(*chunks: bytes, complete: bool = True) -> Answer:
    def answer(handler: Handler) -> None:
        handler.begin_events()
        for data in chunks:
            handler.send_chunk(data)
        if complete:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def streams(*texts: str, prompt_tokens: int = 9) -> Answer:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts), "total_tokens": 0}
    return streams_raw(
        event(chunk(role="assistant", content="")),
        b": keep-alive\n\n",
        *(event(chunk(text)) for text in texts),
        event(chunk(finish_reason="stop")),
        event({**chunk(), "choices": [], "usage": usage}),
        b"data: [DONE]\n\n",
    )


def chunk(content: str | None = None, *, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    if content is not None:
        delta["content"] = content
    return {
        "id": "chatcmpl-7f3a",
        "object": "chat.completion.chunk",
        "created": 1764504000,
        "model": "smollm2",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
        "usage": None,
    }


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


class _UnixServer(ThreadingMixIn, UnixStreamServer):
    pass


@contextmanager
def serving(*, socket: Path | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Script]:
    server = _UnixServer(str(socket), Handler) if socket else ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.script = script = Script()
    script.url = f"unix:{socket}" if socket else f"http://127.0.0.1:{server.server_address[1]}"
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        script.url = script.url.replace("http:", "https:")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
