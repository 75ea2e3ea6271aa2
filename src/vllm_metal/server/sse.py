"""Server-sent events to one client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web
from msgspec import Struct

from vllm_metal.api import errors
from vllm_metal.errors import EngineError, InvalidRequest, MetalError

logger = logging.getLogger(__name__)

#: A comment goes out when nothing else has for this long, so that no proxy or client gives up.
KEEP_ALIVE_S = 10.0

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def openai_failure(exc: MetalError) -> Sequence[Struct]:
    """The error body, as an event."""
    return [errors.body(exc)]


class EventStream:
    """Entering it sends the headers; leaving it sends what went wrong, if anything, as `failure` puts it.

    Events that are `named` go by their structs' tags. A stream of others ends with `[DONE]`. Raises
    ConnectionError when the client has gone.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        failure: Callable[[MetalError], Sequence[Struct]] = openai_failure,
        named: bool = False,
    ) -> None:
        self._request = request
        self._failure = failure
        self._named = named
        self.response = web.StreamResponse(headers=_HEADERS)

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._last_write = asyncio.get_running_loop().time()
        self._keeping_alive = asyncio.create_task(self._keep_alive())
        return self

    async def send(self, *events: Any) -> None:
        if events:
            await self._write(b"".join(map(self._encoded, events)))

    def _encoded(self, event: Any) -> bytes:
        name = b"event: %b\n" % event.__struct_config__.tag.encode() if self._named else b""
        return b"%bdata: %b\n\n" % (name, msgspec.json.encode(event))

    async def comment(self, text: str) -> None:
        """What no client takes for an event."""
        await self._write(f": {text}\n\n".encode())

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._keeping_alive.cancel()
        if exc is not None:
            if isinstance(exc, ConnectionError) or not isinstance(exc, Exception):
                return False
            await self.send(*self._failure(as_metal_error(exc)))
        if not self._named:
            await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return True

    async def _write(self, data: bytes) -> None:
        self._last_write = asyncio.get_running_loop().time()
        await self.response.write(data)

    async def _keep_alive(self) -> None:
        now = asyncio.get_running_loop().time
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._last_write + KEEP_ALIVE_S - now())
                if now() - self._last_write >= KEEP_ALIVE_S:
                    await self.comment("keep-alive")


def as_metal_error(exc: Exception) -> MetalError:
    """What the client is told of `exc`; what is ours to mend is logged."""
    if isinstance(exc, RecursionError):  # Nothing else recurses here than what goes through a body.
        return InvalidRequest("the body is nested too deeply")
    if not isinstance(exc, MetalError):
        logger.error("internal error", exc_info=exc)
        return EngineError(f"internal error: {type(exc).__name__}")
    if errors.kind(exc).status == 500:
        logger.error("%s", exc.message)
    return exc
