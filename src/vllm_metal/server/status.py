"""GET /admin/status: the server, its models and its requests on one page."""

from __future__ import annotations

import math
import os
import time

from aiohttp import web

from vllm_metal import __version__
from vllm_metal.api.status import ModelStatus, ServerStatus
from vllm_metal.server import bodies
from vllm_metal.server.keys import INSTALLATION, MANAGER
from vllm_metal.server.model_manager import ModelManager, in_words
from vllm_metal.server.resident_model import ResidentModel


async def status(request: web.Request) -> web.Response:
    manager = request.app[MANAGER]
    models = [
        model_status(model, manager)
        for model in manager.roster.models
        if model is manager.roster.default or model.state != "unloaded"
    ]
    return bodies.reply(
        ServerStatus(
            version=__version__,
            pid=os.getpid(),
            uptime_s=max(0.0, time.time() - manager.created),
            restart_needed=request.app[INSTALLATION].is_outdated(),
            models=models,
            num_running=sum(model.num_running for model in models),
            num_waiting=sum(model.num_waiting for model in models),
        )
    )


def model_status(model: ResidentModel, manager: ModelManager) -> ModelStatus:
    health = manager.health()
    told = ModelStatus(model.name, model.state, model.stage, is_default=model is manager.roster.default)
    if health.status != "ok":
        told.status, told.stage, told.detail = health.status, health.stage, health.detail
    elif model.state == "failed" and model.failure is not None:
        told.detail = in_words(model.failure.error)
    told.path = None if model.local is None else str(model.local.path)
    told.pinned = model.is_pinned
    told.num_waiting = model.num_waiting
    if (engine := model.engine) is not None and (summary := engine.summary):
        told.size_bytes = summary.weight_bytes
        told.number_format = summary.number_format
        told.device = summary.device
        told.mode = summary.mode
        told.load_s = summary.load_s
        told.max_model_len = engine.max_model_len
        told.idle_s = engine.idle_s
        told.num_running = engine.num_running
        told.unloads_in_s = model.unloads_in_s if math.isfinite(model.unloads_in_s) else None
    return told
