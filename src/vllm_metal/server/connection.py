"""One connection: aiohttp's, with what is no HTTP refused in the shape of all other errors."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from vllm_metal.api import errors
from vllm_metal.server import bodies, middlewares

_MAX_MESSAGE_LENGTH = 200


class Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Raises ConnectionError when a reply has begun."""
        super().handle_error(request, status, exc, message)
        if status < 500 and message:
            # The lines that follow show the bytes.
            reason = f"this is no HTTP request: {message.partition(chr(10))[0][:_MAX_MESSAGE_LENGTH]}"
        else:
            reason = HTTPStatus(status).phrase
        body = errors.http_body(status, reason)
        reply = bodies.reply(body, status=status, headers=middlewares.common_headers(request))
        reply.force_close()
        return reply
