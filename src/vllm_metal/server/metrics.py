"""GET /metrics."""

from __future__ import annotations

from aiohttp import hdrs, web

from vllm_metal.engine.outputs import EngineStats
from vllm_metal.monitor import exposition
from vllm_metal.monitor.exposition import ModelFigures, ServerFigures
from vllm_metal.server.keys import MACHINE_WATCH, MANAGER
from vllm_metal.server.resident_model import ResidentModel


async def metrics(request: web.Request) -> web.Response:
    roster = request.app[MANAGER].roster
    models = [
        _figures(model) for model in roster.models if model is roster.default or model.phase == "loaded"
    ]
    with_mlx = any(each.model is not None for each in models)
    figures = ServerFigures(models, await request.app[MACHINE_WATCH].look(with_mlx=with_mlx))
    return web.Response(body=exposition.render(figures), headers={hdrs.CONTENT_TYPE: exposition.CONTENT_TYPE})


def _figures(model: ResidentModel) -> ModelFigures:
    # While it is being loaded there is an engine that knows nothing yet.
    engine = model.engine
    summary = None if engine is None else engine.summary
    return ModelFigures(
        model_name=model.name,
        num_running=0 if engine is None else engine.num_running,
        num_waiting=model.num_waiting,
        stats=EngineStats() if engine is None else engine.stats,
        model=summary,
        max_model_len=None if engine is None or summary is None else engine.max_model_len,
    )
