"""The daemon's life: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vllm_metal.config import Config
from vllm_metal.server import sockets
from vllm_metal.server.app import create_app
from vllm_metal.server.model_manager import ModelManager

logger = logging.getLogger(__name__)

STOPPED = 0
INTERRUPTED = 130

_BACKLOG = 1024


async def serve(config: Config, manager: ModelManager, on_listening: Callable[[list[str]], None]) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code; `on_listening` gets the URLs.

    Raises PortInUse or ConfigError before anything has started, and the error that made the manager give up.
    """
    server = config.server
    tls = sockets.ssl_context(server)
    bound = sockets.bind(server)
    # What `drain_timeout` allows is shared out: aiohttp waits twice for replies still being written.
    flush_s = min(2.0, server.drain_timeout / 4)
    runner = web.AppRunner(
        create_app(manager, config), handler_cancellation=True, access_log=None, shutdown_timeout=flush_s
    )
    # Errors of handlers are ours to log; what is left is traces of bytes that are not HTTP.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    with _signals() as signals:
        try:
            await runner.setup()
            for sock in bound:
                await web.SockSite(runner, sock, ssl_context=tls, backlog=_BACKLOG).start()
            on_listening([sockets.url(sock, tls=tls is not None) for sock in bound])
            manager.start()
            await _first_of(signals.stop, manager.fatal)
            draining = asyncio.create_task(manager.drain(server.drain_timeout - 2 * flush_s))
            await _first_of(draining, signals.hurry)
            draining.cancel()
        finally:
            await manager.close()
            await runner.cleanup()
            sockets.close(bound, server)
    if manager.fatal.done():
        raise manager.fatal.result()
    return INTERRUPTED if signals.hurry.done() else STOPPED


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True, slots=True)
class Signals:
    """`stop` is done at the first SIGTERM or SIGINT, `hurry` at a SIGINT after that."""

    stop: asyncio.Future[None]
    hurry: asyncio.Future[None]

    def received(self, number: signal.Signals) -> None:
        if not self.stop.done():
            logger.info("%s: finishing what is under way", number.name)
            self.stop.set_result(None)
        elif number == signal.SIGINT and not self.hurry.done():
            self.hurry.set_result(None)


@contextmanager
def _signals() -> Iterator[Signals]:
    loop = asyncio.get_running_loop()
    signals = Signals(loop.create_future(), loop.create_future())
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, signals.received, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
