"""GET /health, /ping and /version."""

from __future__ import annotations

from aiohttp import web

from vllm_metal import __version__
from vllm_metal.server import bodies
from vllm_metal.server.keys import INSTALLATION, MANAGER


async def health(request: web.Request) -> web.Response:
    """200 when a request would be taken, else 503 with the reason."""
    state = request.app[MANAGER].health()
    if state.status == "ok":
        return bodies.reply({"status": "ok"})
    body = {"status": state.status, "stage": state.stage, "detail": state.detail}
    return bodies.reply(
        {name: value for name, value in body.items() if value},
        status=503,
        headers={"Retry-After": str(state.retry_after_s)},
    )


async def version(request: web.Request) -> web.Response:
    """The running version, and whether an upgrade awaits a restart."""
    outdated = request.app[INSTALLATION].is_outdated()
    return bodies.reply({"version": __version__} | ({"restart_needed": True} if outdated else {}))
