"""GET /admin/model-folders: what the daemon itself may read, which can be less than its user may."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from vllm_metal.api.folders import ModelFolder, ModelFolders
from vllm_metal.hub import folders
from vllm_metal.server import bodies
from vllm_metal.server.keys import CONFIG

_READ_TIMEOUT_S = 5.0


async def model_folders(request: web.Request) -> web.Response:
    paths = await asyncio.to_thread(folders.model_folders, request.app[CONFIG].models)
    problems = await asyncio.gather(*map(_read_problem, paths))
    found = [
        ModelFolder(str(path), problem is None, problem)
        for path, problem in zip(paths, problems, strict=True)
    ]
    return bodies.reply(ModelFolders(found))


async def _read_problem(path: Path) -> str | None:
    """On a thread that nobody waits for: macOS may hold up for ever what an agent reads without leave."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[str | None] = loop.create_future()

    def finish(problem: str | None) -> None:
        if not result.done():
            result.set_result(problem)

    def read() -> None:
        problem = folders.read_problem(path)
        # The loop may have closed meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, problem)

    threading.Thread(target=read, name="read-folder", daemon=True).start()
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            return await result
    except TimeoutError:
        return f"it cannot be read within {_READ_TIMEOUT_S:g} s"
