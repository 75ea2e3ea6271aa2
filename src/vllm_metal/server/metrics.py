"""GET /metrics."""

from __future__ import annotations

from aiohttp import hdrs, web

from vllm_metal.engine.outputs import EngineStats
from vllm_metal.monitor import exposition
from vllm_metal.monitor.exposition import ServerFigures
from vllm_metal.server.keys import MACHINE_WATCH, MANAGER


async def metrics(request: web.Request) -> web.Response:
    manager = request.app[MANAGER]
    # Without a model yet, it may be loading.
    engine = manager.engine
    model = None if engine is None else engine.summary
    machine = await request.app[MACHINE_WATCH].look(with_mlx=model is not None)
    figures = ServerFigures(
        model_name=manager.served_names[0],
        num_running=0 if engine is None else engine.num_running,
        num_waiting=0 if engine is None else engine.num_waiting,
        stats=EngineStats() if engine is None else engine.stats,
        model=model,
        max_model_len=None if engine is None or model is None else engine.max_model_len,
        machine=machine,
    )
    return web.Response(body=exposition.render(figures), headers={hdrs.CONTENT_TYPE: exposition.CONTENT_TYPE})
