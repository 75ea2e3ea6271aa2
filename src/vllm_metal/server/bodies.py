"""JSON bodies, in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web

from vllm_metal.api.decoding import RequestT, decode
from vllm_metal.errors import InvalidRequest

#: How long a body may take to arrive. Without end it could hold a connection for ever.
BODY_WAIT_S = 60.0

BADLY_ENCODED = "the body is not encoded as its headers say"
#: The content codings that aiohttp undoes, whatever packages there are.
ENCODINGS = ("gzip", "deflate")
#: A body of one of these has been decoded before a handler sees it.
_UNDONE = {"", "identity", *ENCODINGS, "br", "zstd"}


async def read(request: web.Request, request_type: type[RequestT]) -> RequestT:
    """Raises InvalidRequest, and as `receive` does."""
    return decode(await receive(request), request_type)


async def receive(request: web.Request) -> bytes:
    """The body, of JSON if it is what it says. Raises InvalidRequest, and HTTP's 408, 413 and 415."""
    # A missing content type gets the benefit of the doubt.
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(
            text=f"the body must be `application/json`, not `{request.content_type}`"
        )
    encoding = ", ".join(request.headers.getall("Content-Encoding", ())).lower()
    if encoding not in _UNDONE:
        raise web.HTTPUnsupportedMediaType(
            text=unknown_encoding(encoding), headers={"Accept-Encoding": ", ".join(ENCODINGS)}
        )
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body was not complete within {BODY_WAIT_S:g} s") from None
    except web.RequestPayloadError as exc:
        raise InvalidRequest(BADLY_ENCODED, hint="check `Content-Encoding` and `Transfer-Encoding`") from exc


def unknown_encoding(encoding: str) -> str:
    known = " or ".join(f"`{each}`" for each in ENCODINGS)
    # A header may hold bytes that are no text.
    encoding = encoding.encode(errors="backslashreplace").decode()
    return f"the body's `Content-Encoding` must be {known}, not `{encoding}`"


def reply(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json"
    )
