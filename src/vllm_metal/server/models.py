"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web
from msgspec.structs import replace

from vllm_metal.api.models import Model, ModelList
from vllm_metal.errors import ModelNotFound
from vllm_metal.server import bodies
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.model_directory import ListedModel
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


async def _models(manager: ModelManager) -> AsyncIterator[tuple[Model, set[str]]]:
    """Each with the names that ask for it, the default one first; LoRA adapters follow their model."""
    async for told, names in _without_adapters(manager):
        yield told, names
        for adapter, model in manager.roster.adapters.items():
            if model in names:
                yield replace(told, id=adapter, parent=told.id), {adapter}


async def _without_adapters(manager: ModelManager) -> AsyncIterator[tuple[Model, set[str]]]:
    for listed, resident in await manager.roster.listed():
        called = set() if listed is None else set(listed.names)
        called |= set() if resident is None else manager.roster.names_of(resident)
        if resident is manager.roster.default:
            first, *others = manager.roster.served_names
            yield _told(first, manager, listed, resident), called.difference(others)
            for name in others:
                yield _told(name, manager, listed, resident), {name}
        elif listed is not None:
            yield _told(listed.local.name, manager, listed, resident), called
        elif resident is not None:
            # Its files have gone since it was loaded.
            yield _told(resident.name, manager, listed, resident), called


def _told(
    name: str, manager: ModelManager, listed: ListedModel | None, resident: ResidentModel | None
) -> Model:
    told = Model(name, manager.created)
    if listed is not None:
        told.max_model_len, told.kind = listed.max_model_len, listed.kind
    if resident is not None:
        told.state = resident.state
        if resident.phase == "loaded" and resident.engine is not None:
            told.max_model_len = resident.engine.max_model_len
    return told
