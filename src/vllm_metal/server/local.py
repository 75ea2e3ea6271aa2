"""A model in this process, behind the same API: the server on a private socket, and a client of it."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from aiohttp import web

from vllm_metal.client import Client
from vllm_metal.config import Config
from vllm_metal.hub.progress import OnProgress
from vllm_metal.server.app import create_app
from vllm_metal.server.model_manager import ModelManager


class LocalClient:
    """Entering it loads `model` and gives a `Client`, or raises what loading raised. Leaving frees it."""

    def __init__(self, model: str, config: Config, on_progress: OnProgress | None = None) -> None:
        self._config = replace(
            config,
            server=replace(config.server, api_keys=()),
            models=replace(config.models, default=model, served_names=()),
        )
        self._on_progress = on_progress

    def __enter__(self) -> Client:
        self._folder = tempfile.TemporaryDirectory(prefix="metal-")
        socket = Path(self._folder.name) / "socket"
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(socket)), name="local server")
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return Client(f"unix:{socket}")

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._folder.cleanup()

    async def _serve(self, socket: Path) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            manager = ModelManager(self._config, on_progress=self._on_progress)
        except BaseException as exc:
            self._ready.set_exception(exc)
            await self._stop.wait()
            return
        runner = web.AppRunner(create_app(manager, self._config), handler_cancellation=True, access_log=None)
        try:
            await runner.setup()
            await web.UnixSite(runner, str(socket)).start()
            manager.start()
            stopped = asyncio.create_task(self._stop.wait())
            settled = asyncio.create_task(manager.settled())
            await asyncio.wait([stopped, settled], return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
            if manager.fatal.done():
                self._ready.set_exception(manager.fatal.result())
            else:
                self._ready.set_result(None)
            await stopped
        finally:
            await manager.close()
            await runner.cleanup()
