"""GET /health, /ready, /ping, /version and /load."""

from __future__ import annotations

import os

from aiohttp import web

from vllm_metal import __version__
from vllm_metal.api.health import Health, Load, Version
from vllm_metal.server import bodies
from vllm_metal.server.keys import INSTALLATION, MANAGER
from vllm_metal.service import venv


async def health(request: web.Request) -> web.Response:
    """200 when a request would be taken, else 503 with the reason."""
    state = request.app[MANAGER].health()
    if state.status == "ok":
        return bodies.reply(Health("ok"))
    return bodies.reply(
        Health(state.status, state.stage, state.detail),
        status=503,
        headers={"Retry-After": str(state.retry_after_s)},
    )


async def version(request: web.Request) -> web.Response:
    """Which version and process runs, and whether an upgrade awaits its restart."""
    stamp = venv.own_stamp()
    return bodies.reply(
        Version(
            __version__,
            os.getpid(),
            stamp.package_sha256 if stamp else None,
            request.app[INSTALLATION].is_outdated(),
        )
    )


async def load(request: web.Request) -> web.Response:
    engine = request.app[MANAGER].engine
    return bodies.reply(Load(0 if engine is None else engine.num_streams))
