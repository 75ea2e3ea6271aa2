"""POST /admin/models/load and /admin/models/unload."""

from __future__ import annotations

from aiohttp import web

from vllm_metal.api import keep_alive
from vllm_metal.api.residency import LoadRequest, UnloadRequest
from vllm_metal.errors import InvalidRequest
from vllm_metal.server import bodies
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.status import model_status


async def load(request: web.Request) -> web.Response:
    """Answers once the model is there."""
    body = await bodies.read(request, LoadRequest)
    manager = request.app[MANAGER]
    model = await manager.load(body.model, keep_alive.seconds(body.keep_alive))
    return bodies.reply(model_status(model, manager))


async def unload(request: web.Request) -> web.Response:
    """Answers once the model's requests have ended and its memory is free."""
    body = await bodies.read(request, UnloadRequest)
    if not body.model:
        # Elsewhere that means the default model, which nobody wants to lose by a slip.
        raise InvalidRequest("`model` must name the model to unload", param="model")
    manager = request.app[MANAGER]
    return bodies.reply(model_status(await manager.unload(body.model), manager))
