"""A model hub on loopback: the endpoints that the hub's own client uses, answered as the real one does."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

TOKEN = "hf_accepted"
PIECE = 1 << 16


@dataclass
class Repository:
    """`cut_after` and `hold_after` map a file to a number of bytes after which its first answer stops.

    Large files, by their suffix, are kept in LFS: known by their SHA-256 and answered with a redirect.
    `refuse_with` are the statuses of a file's first answers; `served_as` is other content than announced.
    """

    files: dict[str, bytes]
    gated: bool = False
    branches: tuple[str, ...] = ("main",)
    knows_ranges: bool = True
    gguf: dict[str, Any] | None = None
    cut_after: dict[str, int] = field(default_factory=dict)
    hold_after: dict[str, int] = field(default_factory=dict)
    refuse_with: dict[str, list[int]] = field(default_factory=dict)
    served_as: dict[str, bytes] = field(default_factory=dict)

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
        self.num_sent: Counter[str] = Counter()  # bytes of each file
        self.status: int | None = None  # answers everything with this, and no more
        self.held = threading.Semaphore(0)  # one more for each answer that is held
        self.released = threading.Event()

    def fetched(self) -> set[str]:
        """Files of which any byte was asked for."""
        return {each.path.split("/resolve/")[1].split("/", 1)[1] for each in self.requests if _is_body(each)}

    def ranges(self, file: str) -> list[str | None]:
        """What of a file in LFS was asked for, request by request."""
        return [each.byte_range for each in self.requests if each.path == f"/lfs/{file}"]

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
        elif path.startswith("/lfs/"):
            self._send_large(path.removeprefix("/lfs/"), token)
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
                    | _lfs(path, body, "oid")
                    for path, body in repository.files.items()
                ]
            )
        else:
            siblings = [
                {"rfilename": path, "size": len(body), "blobId": _etag(body)} | _lfs(path, body, "sha256")
                for path, body in repository.files.items()
            ]
            told = {"id": name, "sha": repository.commit, "siblings": siblings}
            self._send_json(told | ({"gguf": repository.gguf} if repository.gguf else {}))

    def _send_file(self, path: str, token: str | None) -> None:
        name, _, rest = path.strip("/").partition("/resolve/")
        file = rest.partition("/")[2]
        repository = self.hub.repositories[name]
        if repository.gated and token != TOKEN:
            self._refuse(403 if token else 401, code="GatedRepo")
        elif file not in repository.files:
            self._refuse(404, code="EntryNotFound")
        elif _is_large(file):
            body = repository.files[file]
            self.send_response(302)
            self.send_header("X-Repo-Commit", repository.commit)
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(body)))
            # Another host, which the token is no business of.
            self.send_header(
                "Location", f"http://localhost:{self.server.server_port}/lfs/{name}/{quote(file)}"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send_content(repository, file, file)

    def _send_large(self, path: str, token: str | None) -> None:
        name, file = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:])
        if token is not None:
            self._refuse(400, message="Only one auth mechanism allowed")
        else:
            self._send_content(self.hub.repositories[name], file, path)

    def _send_content(self, repository: Repository, file: str, counted_as: str) -> None:
        if self.command == "GET" and repository.refuse_with.get(file):
            self._refuse(repository.refuse_with[file].pop(0))
            return
        body = repository.served_as.get(file, repository.files[file])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and repository.knows_ranges else 0
        end = min(
            int(asked[2]) + 1 if asked and asked[2] and repository.knows_ranges else len(body), len(body)
        )
        if asked and start >= len(body):
            self._refuse(416)
            return
        self.send_response(206 if asked and repository.knows_ranges else 200)
        self.send_header("ETag", f'"{_etag(repository.files[file])}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Content-Length", str(end - start))
        if asked and repository.knows_ranges:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):
                self._send_body(repository, file, counted_as, body[:end], start)
                return
            self.close_connection = True

    def _send_body(self, repository: Repository, file: str, counted_as: str, body: bytes, start: int) -> None:
        if (stop := repository.cut_after.pop(file, None)) is not None:
            self._write(counted_as, body[start:stop])
            self.close_connection = True
            return
        if (stop := repository.hold_after.pop(file, None)) is not None:
            self._write(counted_as, body[start:stop])
            start = max(start, stop)
            self.hub.held.release()
            self.hub.released.wait()
        self._write(counted_as, body[start:])

    def _write(self, counted_as: str, body: bytes) -> None:
        for start in range(0, len(body), PIECE):
            self.wfile.write(body[start : start + PIECE])
            self.hub.num_sent[counted_as] += len(body[start : start + PIECE])

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


def _is_large(file: str) -> bool:
    return file.endswith((".safetensors", ".gguf", ".bin"))


def _lfs(file: str, body: bytes, key: str) -> dict[str, Any]:
    """What the hub adds of a large file; its two listings name the checksum differently."""
    if not _is_large(file):
        return {}
    return {"lfs": {key: hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}}


def _etag(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
