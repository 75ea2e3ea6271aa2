"""The replies of all that goes wrong, each in the shape of the API that was asked."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from vllm_metal.api import errors, message_errors
from vllm_metal.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineUnavailable,
    InsufficientMemory,
    MetalError,
)
from vllm_metal.server import bodies
from vllm_metal.server.request_id import request_id

_MESSAGES = "/v1/messages"


def asks_anthropic(request: web.BaseRequest) -> bool:
    """Whether this is a request to Anthropic's API, to a route that there is or not."""
    return request.path == _MESSAGES or request.path.startswith(f"{_MESSAGES}/")


def of(request: web.BaseRequest, exc: MetalError) -> web.Response:
    headers = {}
    if isinstance(exc, EngineBusy | EngineUnavailable):
        headers["Retry-After"] = str(exc.retry_after_s)
    elif isinstance(exc, DeadlineExceeded | InsufficientMemory):
        # Clients would try it again: a 408 takes as long again, a 507 stays one.
        headers["x-should-retry"] = "false"
    body = message_errors.body(exc, request_id(request)) if asks_anthropic(request) else errors.body(exc)
    return bodies.reply(body, status=errors.kind(exc).status, headers=headers)


def of_http(
    request: web.BaseRequest, status: int, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """For what HTTP itself has a status for."""
    body = (
        message_errors.http_body(status, message, request_id(request))
        if asks_anthropic(request)
        else errors.http_body(status, message)
    )
    return bodies.reply(body, status=status, headers=headers)
