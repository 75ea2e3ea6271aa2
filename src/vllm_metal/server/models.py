"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web
from msgspec.structs import replace

from vllm_metal.api.models import Model, ModelList
from vllm_metal.errors import ModelNotFound
from vllm_metal.hub.model_kind import model_kind
from vllm_metal.server import bodies
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.resident_model import ResidentModel


async def list_models(request: web.Request) -> web.Response:
    return bodies.reply(ModelList([model async for model, _ in _models(request.app[MANAGER])]))


async def get_model(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    async for model, names in _models(request.app[MANAGER]):
        if name in names:
            return bodies.reply(model)
    raise ModelNotFound(f"no model `{name}` is served here", hint="`GET /v1/models` lists those that are")


async def _models(manager: ModelManager) -> AsyncIterator[tuple[Model, frozenset[str]]]:
    """Each with the names that ask for it, the default one first; LoRA adapters follow their model."""
    async for told, names in _without_adapters(manager):
        yield told, names
        for adapter, model in manager.adapters.items():
            if model in names:
                yield replace(told, id=adapter, parent=told.id), frozenset({adapter})


async def _without_adapters(manager: ModelManager) -> AsyncIterator[tuple[Model, frozenset[str]]]:
    default = manager.default
    kind = model_kind(default.local.path) if default.local else None
    for name in manager.served_names:
        told = Model(name, manager.created, max_model_len=_length(default), kind=kind, state=default.state)
        yield told, frozenset({name})
    for listed, resident in await manager.listed():
        told = Model(
            listed.local.name, manager.created, max_model_len=listed.context_length, kind=listed.kind
        )
        if resident is not None:
            told.state = resident.state
            told.max_model_len = _length(resident) or told.max_model_len
        yield told, listed.names


def _length(model: ResidentModel) -> int | None:
    return model.engine.max_model_len if model.phase == "loaded" and model.engine else None
