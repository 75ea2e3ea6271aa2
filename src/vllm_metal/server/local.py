"""A model in this process, behind the same API: the server on a private socket, and a client of it."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from vllm_metal.client import Client
from vllm_metal.config import Config
from vllm_metal.hub.progress import ShowProgress, silence
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.run import running
from vllm_metal.settings import ServerConfig


class LocalClient:
    """Entering it loads the default model and gives a `Client`, or raises what loading raised. Leaving frees
    it.
    """

    def __init__(self, config: Config, show_progress: ShowProgress = silence) -> None:
        self._config = replace(config, models=replace(config.models, served_names=()))
        self._show_progress = show_progress

    def __enter__(self) -> Client:
        self._folder = tempfile.TemporaryDirectory(prefix="metal-")
        socket = Path(self._folder.name) / "socket"
        # Of the configured server nothing applies: this one is private.
        config = replace(self._config, server=ServerConfig(uds=str(socket)))
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(config)), name="local server")
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

    async def _serve(self, config: Config) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            manager = ModelManager(config, show_progress=self._show_progress)
            async with running(config, manager):
                stopped = asyncio.create_task(self._stop.wait())
                settled = asyncio.create_task(manager.settled())
                await asyncio.wait([stopped, settled], return_when=asyncio.FIRST_COMPLETED)
                settled.cancel()
                if manager.fatal.done():
                    raise manager.fatal.result()
                self._ready.set_result(None)
                await stopped
        except BaseException as exc:
            if self._ready.done():
                raise
            self._ready.set_exception(exc)
            await self._stop.wait()
