"""Sends one prompt to an OpenAI-compatible server and records when its answer arrives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from vllm_metal.bench.events import EventParser
from vllm_metal.bench.load import Prompt
from vllm_metal.bench.record import RequestRecord

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`url` is without `/v1`, or `unix:/path`. `sampling` are further fields of each request's body."""

    url: str
    endpoint_type: Literal["chat", "completions"] = "chat"
    model: str | None = None
    api_key: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> bytes:
        fields: dict[str, Any] = {
            **self.sampling,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            fields["model"] = self.model
        if self.endpoint_type == "completions":
            fields["prompt"] = f"{prompt.shared} {prompt.text}".lstrip()
        else:
            system = [{"role": "system", "content": prompt.shared}] if prompt.shared else []
            fields["messages"] = [*system, {"role": "user", "content": prompt.text}]
        return json.dumps(fields).encode()


class StreamingClient:
    """Every request opens a connection of its own, as clients of different people do."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def __aenter__(self) -> Self:
        url, headers = self._target.url, {"Content-Type": "application/json"}
        if self._target.api_key is not None:
            headers["Authorization"] = f"Bearer {self._target.api_key}"
        connector: aiohttp.BaseConnector
        if url.startswith("unix:"):
            connector = aiohttp.UnixConnector(url.removeprefix("unix:"), limit=0, force_close=True)
            url = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._url = url + _PATHS[self._target.endpoint_type]
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout()
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def stream(self, prompt: Prompt, record: RequestRecord) -> None:
        """Fill `record` while the answer arrives. Whatever goes wrong ends up in `record.error`."""
        body = self._target.body(prompt)
        record.started_s = perf_counter()
        try:
            async with self._session.post(self._url, data=body) as response:
                record.status = response.status
                if response.status == 200:
                    await _read(response.content, record)
                else:
                    record.error = _message(await response.text(), f"the server answered {response.status}")
        except (aiohttp.ClientError, OSError) as exc:
            record.error = f"the connection failed: {exc or type(exc).__name__}"
        except (ValueError, TypeError, AttributeError):
            record.error = "the server sent something other than OpenAI's chunks"
        if record.error is not None:
            record.finished_s = perf_counter()


async def _read(content: aiohttp.StreamReader, record: RequestRecord) -> None:
    parser, complete = EventParser(), False
    async for received in content.iter_any():
        now_s = perf_counter()
        for data in parser.feed(received):
            if data == b"[DONE]":
                complete = True
                continue
            chunk = json.loads(data)
            if chunk.get("error"):
                record.error = _message(data.decode(), "the server sent an error")
                return
            if usage := chunk.get("usage"):
                record.prompt_tokens = usage.get("prompt_tokens")
                record.completion_tokens = usage.get("completion_tokens")
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            for choice in chunk.get("choices") or ():
                record.finished_s = now_s
                if _has_text(choice):
                    record.arrivals_s.append(now_s)
                complete = complete or choice.get("finish_reason") is not None
    if not complete or not record.finished_s:
        record.error = "the server broke off before its answer was complete"


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {"content": choice.get("text")}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _message(body: str, otherwise: str) -> str:
    """The message of an error reply, in any of the shapes that servers give it."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return otherwise
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or otherwise).split())
