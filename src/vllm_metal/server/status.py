"""GET /admin/status: the server, its model and its requests on one page."""

from __future__ import annotations

import os
import time

from aiohttp import web

from vllm_metal import __version__
from vllm_metal.api.status import ModelStatus, ServerStatus
from vllm_metal.server import bodies
from vllm_metal.server.keys import INSTALLATION, MANAGER
from vllm_metal.server.model_manager import ModelManager


async def status(request: web.Request) -> web.Response:
    manager = request.app[MANAGER]
    engine = manager.engine
    return bodies.reply(
        ServerStatus(
            version=__version__,
            pid=os.getpid(),
            uptime_s=max(0.0, time.time() - manager.created),
            restart_needed=request.app[INSTALLATION].is_outdated(),
            models=[_model(manager)],
            num_running=0 if engine is None else engine.num_running,
            num_waiting=0 if engine is None else engine.num_waiting,
        )
    )


def _model(manager: ModelManager) -> ModelStatus:
    health, engine = manager.health(), manager.engine
    model = ModelStatus(manager.served_names[0], health.status, health.stage, health.detail)
    model.path = None if manager.path is None else str(manager.path)
    if engine is not None and (summary := engine.summary):
        model.size_bytes = summary.weight_bytes
        model.number_format = summary.number_format
        model.device = summary.device
        model.mode = summary.mode
        model.load_s = summary.load_s
        model.max_model_len = engine.max_model_len
        model.idle_s = engine.idle_s
    return model
