"""Who may ask: API keys, and guards against pages that reach for a server on the reader's own machine."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from vllm_metal.server.keys import PROBES
from vllm_metal.settings import ServerConfig

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "host.docker.internal"})

_HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
_PREFLIGHT_LIFE_S = 600


def authenticate(api_keys: Collection[str]) -> Middleware:
    """Every route but the probes needs one of `api_keys`."""
    known_keys = [key.encode() for key in api_keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if known_keys and request.path not in PROBES:
            given = api_key(request).encode(errors="surrogateescape")
            # Compared with every key, so that the time taken tells nothing.
            matches = [hmac.compare_digest(given, known) for known in known_keys]
            if not any(matches):
                raise web.HTTPUnauthorized(
                    text="a valid API key is needed, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`",
                    headers={hdrs.WWW_AUTHENTICATE: "Bearer"},
                )
        return await handler(request)

    return middleware


def api_key(request: web.Request) -> str:
    """The key that came with the request, empty for none; whether it is a known one is not looked at."""
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    # Clients of Anthropic's that have a key for it send that in any case, beside a bearer's meant for here.
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "").strip()


def check_host(server: ServerConfig) -> Middleware:
    """On a loopback address a foreign `Host` is a page whose name was made to point here (DNS rebinding)."""
    guarded = not server.uds and _is_loopback(server.host)
    allowed = LOCAL_HOSTS | {host.lower() for host in (server.host, *server.allowed_hosts)}

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST, "")
        match = _HOST_AND_PORT.fullmatch(host.lower())
        if guarded and not (match and match[1] in allowed):
            raise web.HTTPForbidden(
                text=f"host `{host}` is not allowed here; `server.allowed_hosts` names those that are"
            )
        return await handler(request)

    return middleware


def check_origin(allowed_origins: Collection[str]) -> Middleware:
    """Refuse what a foreign page posts; answer the preflights of pages that are allowed."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or request.method in ("GET", "HEAD"):
            return await handler(request)
        allowed = _is_allowed(origin, allowed_origins)
        if allowed and request.method == "OPTIONS":
            return _preflight_reply(request)
        if not allowed and not _is_loopback(_host_of(origin)):
            raise web.HTTPForbidden(
                text=f"origin `{origin}` is not allowed here; `server.allowed_origins` names those that are"
            )
        return await handler(request)

    return middleware


def allow_reading(
    allowed_origins: Collection[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """The header that lets a page of an allowed origin read the reply, errors included."""

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and _is_allowed(origin, allowed_origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "X-Request-Id, Request-Id, Retry-After"
            response.headers[hdrs.VARY] = hdrs.ORIGIN

    return on_prepare


def _preflight_reply(request: web.Request) -> web.Response:
    return web.Response(
        status=204,
        headers={
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ""),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(_PREFLIGHT_LIFE_S),
        },
    )


def _is_allowed(origin: str, allowed_origins: Collection[str]) -> bool:
    return origin in allowed_origins or "*" in allowed_origins


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
