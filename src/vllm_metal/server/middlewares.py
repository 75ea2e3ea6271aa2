"""The access log, request ids, and one shape for every error of an API."""

from __future__ import annotations

import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from vllm_metal import __version__
from vllm_metal.server import error_replies, request_id
from vllm_metal.server.keys import PROBES, RATE_LIMIT, TALLY
from vllm_metal.server.sse import as_metal_error

logger = logging.getLogger(__name__)

CLIENT_GONE = 499

#: What replies to HTTP's own errors say in headers.
_KEPT = ("Accept-Encoding", "Allow", "WWW-Authenticate")


@web.middleware
async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One line a request; never what was asked or answered."""
    started = time.perf_counter()
    status = CLIENT_GONE
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        tally = request.get(TALLY)
        logger.log(
            logging.DEBUG if request.path in PROBES else logging.INFO,
            "%s %s %d%s %.3f s",
            request.method,
            request.rel_url.raw_path,
            status,
            f" {tally.usage.prompt_tokens}+{tally.usage.completion_tokens} tokens" if tally else "",
            time.perf_counter() - started,
        )


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Of every reply, those that aiohttp makes before any middleware runs included."""
    response.headers.update(common_headers(request))
    response.headers.update(request.get(RATE_LIMIT, {}))


def common_headers(request: web.BaseRequest) -> dict[str, str]:
    headers = {request_id.HEADER: request_id.request_id(request), "Server": f"vllm-metal/{__version__}"}
    if error_replies.asks_anthropic(request):
        headers["Request-Id"] = headers[request_id.HEADER]
    return headers


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as exc:
        kept = {name: exc.headers[name] for name in _KEPT if name in exc.headers}
        return error_replies.of_http(request, exc.status, _message(request, exc), kept)
    except ConnectionError:
        # Nobody is left to read this; it is for the access log.
        return web.Response(status=CLIENT_GONE)
    except Exception as exc:
        return error_replies.of(request, as_metal_error(exc))


def _message(request: web.Request, exc: web.HTTPException) -> str:
    match exc:
        case web.HTTPNotFound():
            return f"there is nothing at `{request.path}`"
        case web.HTTPMethodNotAllowed(method=method, allowed_methods=allowed):
            return f"`{request.path}` takes {' or '.join(sorted(allowed))}, not {method}"
        case web.HTTPRequestEntityTooLarge():
            return f"the body is larger than {request.client_max_size} bytes, the most this server takes"
    return exc.text or exc.reason
