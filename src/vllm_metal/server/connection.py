"""One connection: aiohttp's, with what is no HTTP refused in the shape of all other errors, and at once."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import ContentEncodingError

from vllm_metal.server import bodies, error_replies, middlewares

_MAX_MESSAGE_LENGTH = 200


class Connection(web.RequestHandler):
    __slots__ = ("_body",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Of the request that came last.
        self._body: StreamReader | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._messages:
            return
        message, body = self._messages[-1]
        if isinstance(message, RawRequestMessage):
            self._body = body
        elif self._body is not None and not self._body.is_eof():
            # The rest of a body is malformed. aiohttp would refuse it as one more request, which never comes
            # to its turn: the handler of this one waits for the rest.
            self._messages.pop()
            self._body.set_exception(web.RequestPayloadError(message.message))
            self._body.feed_eof()
            self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Raises ConnectionError when a reply has begun."""
        super().handle_error(request, status, exc, message)
        if isinstance(exc, ContentEncodingError):
            status, reason = _encoding_error(exc)
        elif status < 500 and message:
            # The lines that follow show the bytes.
            first_line = message.partition("\n")[0].rstrip(":")
            reason = f"this is no HTTP request: {first_line[:_MAX_MESSAGE_LENGTH]}"
        else:
            reason = HTTPStatus(status).phrase
        reply = _reply(request, status, reason)
        reply.force_close()
        return reply

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # Refused by aiohttp before any middleware runs.
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = _reply(request, resp.status, f"{resp.text}; the only one known is `100-continue`")
        finished = await super().finish_response(request, resp, start_time)
        if resp.status == 413 and "Content-Encoding" in request.headers:
            # aiohttp would go on reading, and a body can come to a thousand times what was sent.
            self.force_close()
        return finished


def _encoding_error(exc: ContentEncodingError) -> tuple[int, str]:
    # What aiohttp says of a coding for which it has no package.
    if missing := re.search(r"\((\w+)\).*install", exc.message, re.DOTALL):
        return 415, bodies.unknown_encoding(missing[1])
    return 400, bodies.BADLY_ENCODED


def _reply(request: web.BaseRequest, status: int, message: str) -> web.Response:
    return error_replies.of_http(request, status, message, middlewares.common_headers(request))
