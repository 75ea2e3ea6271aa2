"""The web application: routes and middlewares, without its life (see `run.py`)."""

from __future__ import annotations

from aiohttp import web

from vllm_metal.config import Config
from vllm_metal.server import middlewares, security
from vllm_metal.server.keys import CONFIG, INSTALLATION, MACHINE_WATCH, MANAGER, OPERATIONS, RESPONSES
from vllm_metal.server.machine_watch import MachineWatch
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.rate_limits import limit_rates
from vllm_metal.server.response_store import ResponseStore
from vllm_metal.server.routes import ROUTES
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
            limit_rates(server),
        ],
    )
    app[CONFIG] = config
    app[MANAGER] = manager
    app[MACHINE_WATCH] = MachineWatch()
    app[RESPONSES] = ResponseStore()
    app[INSTALLATION] = Installation.current()
    app[OPERATIONS] = tuple(operation for operation, _ in ROUTES)
    app.on_response_prepare.append(middlewares.set_headers)
    app.on_response_prepare.append(security.allow_reading(server.allowed_origins))
    for operation, handler in ROUTES:
        # The id of a model may hold slashes.
        path = operation.path.replace("{id}", "{id:.+}")
        app.router.add_route(operation.method.upper(), path, handler)
        if operation.method == "get":
            app.router.add_route("HEAD", path, handler)
    return app
