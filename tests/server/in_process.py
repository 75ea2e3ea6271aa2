"""Runs the real server in this process, over a model that cannot be had: enough for all but answers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vllm_metal.config import Config
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.run import serve
from vllm_metal.settings import ModelsConfig, ServerConfig

T = TypeVar("T")

#: A folder that exists and holds no model.
MODEL = str(Path(__file__).parent)
NAME = "org/name"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["Content-Type"] == "application/json"
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return dict(error)


def with_server(talk: Callable[[list[str]], T], **server: Any) -> T:
    """What `talk(urls)` returns, called on a thread while the server runs; then SIGTERM, and exit code 0."""

    async def run() -> T:
        config = Config(
            server=ServerConfig(**{"port": 0, **server}),
            models=ModelsConfig(default=MODEL, served_names=(NAME,)),
        )
        urls: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(config, ModelManager(config, persistent=True), on_listening=urls.set_result)
        )
        await asyncio.wait({serving, urls}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        try:
            return await asyncio.to_thread(talk, urls.result())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serving == 0

    return asyncio.run(run())


def send(
    url: str, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> Reply:
    """A `body` that is not bytes goes as JSON."""
    headers = dict(headers or {})
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        headers.setdefault("Content-Type", "application/json")
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())
    finally:
        connection.close()


def ask(
    method: str, path: str, body: object = None, headers: dict[str, str] | None = None, **server: Any
) -> Reply:
    """One request to a server of its own."""
    return with_server(lambda urls: send(urls[0], method, path, body, headers), **server)
