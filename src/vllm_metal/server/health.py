"""GET /health, /ready, /ping, /version and /load."""

from __future__ import annotations

import os

from aiohttp import web

from vllm_metal import __version__
from vllm_metal.api.health import Health, Load, Version
from vllm_metal.server import bodies
from vllm_metal.server.keys import INSTALLATION, MANAGER
from vllm_metal.server.model_manager import Health as State
from vllm_metal.service import venv


async def health(request: web.Request) -> web.Response:
    """Of the server: 200 while it takes requests, else 503 with the reason."""
    return _reply(request.app[MANAGER].health())


async def ready(request: web.Request) -> web.Response:
    """Of the default model: 200 when a request for it would be served, else 503 with the reason."""
    return _reply(request.app[MANAGER].readiness())


def _reply(state: State) -> web.Response:
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
    models = request.app[MANAGER].roster.models
    return bodies.reply(Load(sum(model.num_requests for model in models)))
