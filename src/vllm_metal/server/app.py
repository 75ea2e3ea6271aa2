"""The web application: routes and middlewares, without its life (see `run.py`)."""

from __future__ import annotations

from aiohttp import web

from vllm_metal.config import Config
from vllm_metal.server import chat, completions, folders, health, middlewares, models, security
from vllm_metal.server.keys import INSTALLATION, MANAGER, SERVER
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.service.installation import Installation


def create_app(manager: ModelManager, config: Config) -> web.Application:
    server = config.server
    app = web.Application(
        client_max_size=server.max_body_bytes,
        middlewares=[
            middlewares.log_access,
            middlewares.shape_errors,
            security.check_host(server),
            security.check_origin(server.allowed_origins),
            security.authenticate(server.api_keys),
        ],
    )
    app[MANAGER] = manager
    app[INSTALLATION] = Installation.current()
    app[SERVER] = server
    app.on_response_prepare.append(middlewares.set_headers)
    app.on_response_prepare.append(security.allow_reading(server.allowed_origins))
    app.add_routes(
        [
            web.get("/health", health.health),
            web.get("/ping", health.health),
            web.get("/version", health.version),
            web.get("/admin/model-folders", folders.report(config.models)),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{id:.+}", models.get_model),
            web.post("/v1/chat/completions", chat.chat_completions),
            web.post("/v1/completions", completions.completions),
        ]
    )
    return app
