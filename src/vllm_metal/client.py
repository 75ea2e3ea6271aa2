"""The client side of the server's API: blocking, streaming, on the standard library alone."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

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

if TYPE_CHECKING:
    from vllm_metal.settings import ServerConfig

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """One piece of an answer. Joined `text` is the whole of it, behind its `reasoning`; `finish_reason` and
    `usage` come last.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    reasoning: str = ""


class Client:
    """Talks to the server at `url`: `http://…`, `https://…` (a trailing `/v1` is the same) or `unix:/path`.

    Every call raises `ServerUnreachable` when nothing answers and otherwise the `MetalError` that the
    server's error reply stands for. A call opens a connection of its own.
    """

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        self.url, self._path, self._open = _parse(url)
        self.api_key = api_key
        self._headers = {"Accept": "application/json, text/event-stream"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("the API key holds characters that HTTP cannot carry")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, model: str | None = None, **params: Any
    ) -> Generator[ChatDelta, None, None]:
        """Stream the answer to `messages`; `params` are further fields of the request.

        Closing the generator closes the connection, upon which the server drops the request.
        """
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **params}
        if model is not None:
            body["model"] = model
        # No limit on the wait for the first token: a long prompt takes its time.
        with self._exchange("POST", "/v1/chat/completions", body, timeout_s=None) as response:
            for event in sse_events(iter(response.read1, b"")):
                if event == "[DONE]":
                    return
                yield _delta(self._object(event))
        raise self._broken_off()

    def is_ours(self) -> bool:
        """Whether it is vllm-metal that answers, whatever its state and its keys."""
        with self._reply("GET", "/health", timeout_s=REPLY_TIMEOUT_S) as response:
            return (response.headers["Server"] or "").startswith("vllm-metal/")

    def health(self) -> dict[str, Any]:
        """What the server says of its default model; raises `EngineUnavailable` while it loads or drains."""
        return self._get("/ready")

    def version(self) -> dict[str, Any]:
        """The server's `version` and `pid`, and `restart_needed` if an upgrade awaits a restart."""
        return self._get("/version")

    def models(self) -> list[dict[str, Any]]:
        """The served models; `id` is the name to ask for."""
        return list(self._get("/v1/models").get("data", ()))

    def model(self, name: str) -> dict[str, Any]:
        """The served model that `name` asks for."""
        return self._get(f"/v1/models/{quote(name, safe='')}")

    def status(self) -> dict[str, Any]:
        """The server's `models`, each with its state, and how many requests run and wait."""
        status = self._get("/admin/status")
        if "uptime_s" not in status:
            raise EngineError(f"what answers at {self.url} is not vllm-metal, or another version of it")
        return status

    def load(self, model: str, *, keep_alive: float | str | None = None) -> dict[str, Any]:
        """Have `model` in memory; its status once it is. `keep_alive` is how long it may be idle."""
        return self._post("/admin/models/load", {"model": model, "keep_alive": keep_alive})

    def unload(self, model: str) -> dict[str, Any]:
        """Have `model` out of memory, after its requests have ended; its status then."""
        return self._post("/admin/models/unload", {"model": model})

    def model_folders(self) -> list[dict[str, Any]]:
        """The folders that models come from, and whether the server itself may read them."""
        return list(self._get("/admin/model-folders").get("folders", ()))

    def metrics(self) -> str:
        """The server's figures, in Prometheus's text format."""
        with self._exchange("GET", "/metrics", timeout_s=REPLY_TIMEOUT_S) as response:
            return response.read().decode(errors="replace")

    def _get(self, path: str) -> dict[str, Any]:
        with self._exchange("GET", path, timeout_s=REPLY_TIMEOUT_S) as response:
            return self._object(response.read().decode(errors="replace") or "{}")

    def _post(self, path: str, body: object) -> dict[str, Any]:
        # No limit on the wait: a model may have to be downloaded.
        with self._exchange("POST", path, body, timeout_s=None) as response:
            return self._object(response.read().decode(errors="replace") or "{}")

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None
    ) -> Iterator[HTTPResponse]:
        """One request and its reply, if that is no refusal; the body is the caller's to read."""
        with self._reply(method, path, body, timeout_s=timeout_s) as response:
            if response.status != 200:
                raise self._refusal(response)
            yield response

    @contextmanager
    def _reply(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None
    ) -> Iterator[HTTPResponse]:
        data = None if body is None else _json(body)
        headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
        with closing(self._open()) as connection:
            self._connect(connection)
            connection.sock.settimeout(timeout_s)
            try:
                connection.request(method, self._path + path, data, headers)
                with connection.getresponse() as response:
                    yield response
            except TimeoutError as exc:
                raise ServerUnreachable(
                    f"the server at {self.url} gave no answer within {timeout_s:g} s"
                ) from exc
            except (OSError, HTTPException) as exc:
                raise self._broken_off() from exc

    def _connect(self, connection: HTTPConnection) -> None:
        try:
            connection.connect()
        except ssl.SSLError as exc:
            raise ServerUnreachable(
                f"no trusted connection to {self.url}: {exc.reason or exc}",
                hint="if the server's certificate is your own, name its file in `SSL_CERT_FILE`",
            ) from exc
        except OSError as exc:
            raise ServerUnreachable(
                f"no server answers at {self.url}",
                hint="start it with `metal serve` or `metal service start`; `metal chat --local` needs none",
            ) from exc

    def _broken_off(self) -> MetalError:
        return ServerUnreachable(
            f"the server at {self.url} broke off before its answer was complete",
            hint="the server's log says why",
        )

    def _object(self, text: str) -> dict[str, Any]:
        """Parse a JSON object; raises the error it holds, if it holds one."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise EngineError(f"the server at {self.url} sent something other than a JSON object")
        if error := value.get("error"):
            raise _error(500, error)
        return value

    def _refusal(self, response: HTTPResponse) -> MetalError:
        try:
            body = json.loads(response.read())
            # `/ready` tells its state in place of an error.
            error = body.get("error") or body.get("detail") or body["stage"]
        except (ValueError, RecursionError, AttributeError, KeyError):
            error = f"the server at {self.url} answered {response.status} {response.reason}"
        return _error(response.status, error, response.headers["Retry-After"])


def server_url(server: ServerConfig) -> str:
    """Where a client on this machine reaches the server that `server` configures."""
    if server.uds:
        return f"unix:{server.uds}"
    scheme = "https" if server.ssl_certfile else "http"
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def client_of(server: ServerConfig, url: str | None = None, api_key: str | None = None) -> Client:
    """A client of `url`, or where there is none of the server that `server` configures."""
    if url is None:
        url = server_url(server)
        # The configured keys are for the configured server: never sent anywhere else.
        api_key = api_key or next(iter(server.api_keys), None)
    return Client(url, api_key)


def sse_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The `data` of each server-sent event, wherever the chunks were cut; an unfinished event is dropped."""
    data: list[str] = []
    for line in _lines(chunks):
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data.clear()


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines ended by LF, CR or CRLF, each as soon as its end is seen."""
    rest, after_cr = b"", False
    for chunk in filter(None, chunks):
        # A line that ended in CR went out at once: a CRLF cut in two must not end another.
        rest += chunk.removeprefix(b"\n") if after_cr else chunk
        after_cr = chunk.endswith(b"\r")
        lines = rest.splitlines()
        rest = lines.pop() if lines and not rest.endswith((b"\r", b"\n")) else b""
        for line in lines:
            yield line.decode(errors="replace")


def _delta(event: Mapping[str, Any]) -> ChatDelta:
    # The last event carries the usage and no choice.
    choice = (event.get("choices") or [{}])[0]
    usage = event.get("usage")
    delta = choice.get("delta", {})
    return ChatDelta(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
        finish_reason=choice.get("finish_reason"),
        usage=Usage(usage["prompt_tokens"], usage["completion_tokens"]) if usage else None,
    )


def _error(status: int, error: Any, retry_after: str | None = None) -> MetalError:
    """The error of ours that a reply of the server stands for."""
    fields = error if isinstance(error, dict) else {"message": error}
    # The text may quote a model or a template: keep it to one line that cannot drive a terminal.
    message = "".join(c if c.isprintable() else " " for c in str(fields.get("message")))
    code = fields.get("code")
    # An error in mid-stream has no status line; some servers give the status as its code.
    status = code if isinstance(code, int) else status
    if status == 401:
        return MetalError(
            message, hint="give a key that the server knows, with `--api-key` or in `server.api_keys`"
        )
    if status == 429:
        return EngineBusy(message, retry_after_s=_seconds(retry_after, 1))
    if status == 503:
        return EngineUnavailable(message, retry_after_s=_seconds(retry_after, 5))
    if status == 507:
        return InsufficientMemory(message)
    if status >= 500:
        return EngineError(message)
    if code == "model_not_found":
        return ModelNotFound(message)
    if code == PromptTooLong.code:
        hint = "shorten the prompt, or begin a new conversation"
        return PromptTooLong(message, param=fields.get("param"), hint=hint)
    return InvalidRequest(message, param=fields.get("param"))


def _json(body: object) -> bytes:
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest("a text of the request is not valid Unicode") from exc
    except ValueError as exc:
        raise InvalidRequest("a number of the request is infinite or not a number") from exc


def _seconds(retry_after: str | None, otherwise: int) -> int:
    """A `Retry-After` header in seconds; it may be missing, or a date."""
    return max(1, int(retry_after)) if retry_after and retry_after.isdecimal() else otherwise


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


def _parse(url: str) -> tuple[str, str, Callable[[], HTTPConnection]]:
    """The URL to show, the path before every route, and how to make a connection."""
    connections = {"http": HTTPConnection, "https": HTTPSConnection}
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme == "unix" and parts.path:
            return url, "", partial(_UnixConnection, parts.path, timeout=CONNECT_TIMEOUT_S)
        if parts.scheme in connections and parts.hostname:
            path = parts.path.rstrip("/").removesuffix("/v1")
            connection = partial(
                connections[parts.scheme], parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S
            )
            return f"{parts.scheme}://{parts.netloc}{path}", path, connection
    raise ConfigError(
        f"`{url}` is not a server's URL", hint=f"write it like `{DEFAULT_URL}` or `unix:/path/to/socket`"
    )
