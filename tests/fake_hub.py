"""A model hub on loopback: the endpoints that the hub's own client uses, answered as the real one does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_accepted"


@dataclass
class Repository:
    """`cut_after` and `hold_after` map a file to a number of bytes after which its first answer stops."""

    files: dict[str, bytes]
    gated: bool = False
    branches: tuple[str, ...] = ("main",)
    cut_after: dict[str, int] = field(default_factory=dict)
    hold_after: dict[str, int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(json.dumps(sorted(self.files)).encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    byte_range: str | None
    token: str | None


class FakeHub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.status: int | None = None  # answers everything with this, and no more
        self.held = threading.Event()
        self.released = threading.Event()

    def fetched(self) -> set[str]:
        """Files of which any byte was asked for."""
        return {each.path.split("/resolve/")[1].split("/", 1)[1] for each in self.requests if _is_body(each)}

    @contextmanager
    def serving(self) -> Iterator[str]:
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join()


def _is_body(request: Request) -> bool:
    return request.method == "GET" and "/resolve/" in request.path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if self.hub.status is not None:
            self._refuse(self.hub.status)
        elif token not in (None, TOKEN):
            self._refuse(401, message="Invalid credentials in Authorization header")
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/").split("/"))
        else:
            self._send_file(path, token)

    def _describe(self, parts: list[str]) -> None:
        name, kind, revision = "/".join(parts[:2]), parts[2:3], "/".join(parts[3:])
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(401, code="RepoNotFound")
        elif kind and revision not in (*repository.branches, repository.commit):
            self._refuse(404, code="RevisionNotFound")
        elif kind == ["tree"]:
            self._send_json(
                [
                    {"type": "file", "path": path, "size": len(body), "oid": _etag(body)}
                    for path, body in repository.files.items()
                ]
            )
        else:
            siblings = [
                {"rfilename": path, "size": len(body), "blobId": _etag(body)}
                for path, body in repository.files.items()
            ]
            self._send_json({"id": name, "sha": repository.commit, "siblings": siblings})

    def _send_file(self, path: str, token: str | None) -> None:
        name, _, rest = path.strip("/").partition("/resolve/")
        file = rest.partition("/")[2]
        repository = self.hub.repositories[name]
        if repository.gated and token != TOKEN:
            self._refuse(403 if token else 401, code="GatedRepo")
            return
        body = repository.files[file]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(body)}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            self._send_body(repository, file, body, start)

    def _send_body(self, repository: Repository, file: str, body: bytes, start: int) -> None:
        try:
            if (stop := repository.cut_after.pop(file, None)) is not None:
                self.wfile.write(body[start:stop])
                self.close_connection = True
                return
            if (stop := repository.hold_after.pop(file, None)) is not None:
                self.wfile.write(body[start:stop])
                start = stop
                self.hub.held.set()
                self.hub.released.wait()
            self.wfile.write(body[start:])
        except ConnectionError:
            self.close_connection = True

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, *, code: str | None = None, message: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.end_headers()


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
