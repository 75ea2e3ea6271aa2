"""The id of an HTTP request, in the headers of its reply and in the ids of what is in it."""

from __future__ import annotations

import secrets

from aiohttp import web

from vllm_metal.server.keys import REQUEST_ID

HEADER = "X-Request-Id"

_MAX_LENGTH = 128


def request_id(request: web.BaseRequest) -> str:
    """The client's own if it is fit to be sent back, else a new one; always the same for one request."""
    if REQUEST_ID not in request:
        given = request.headers.get(HEADER, "")
        fit = 0 < len(given) <= _MAX_LENGTH and given.isascii() and given.isprintable()
        request[REQUEST_ID] = given if fit else secrets.token_hex(16)
    return request[REQUEST_ID]
