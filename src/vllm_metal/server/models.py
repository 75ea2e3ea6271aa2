"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from aiohttp import web

from vllm_metal.api.models import Model, ModelList
from vllm_metal.errors import ModelNotFound
from vllm_metal.server import bodies
from vllm_metal.server.keys import MANAGER


async def list_models(request: web.Request) -> web.Response:
    manager = request.app[MANAGER]
    return bodies.reply(ModelList([Model(name, manager.created) for name in manager.served_names]))


async def get_model(request: web.Request) -> web.Response:
    manager = request.app[MANAGER]
    name = request.match_info["id"]
    if name not in manager.served_names:
        raise ModelNotFound(f"no model `{name}` is served here", hint="`GET /v1/models` lists those that are")
    return bodies.reply(Model(name, manager.created))
