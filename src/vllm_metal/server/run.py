"""The daemon's life: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vllm_metal.config import Config
from vllm_metal.server import sockets
from vllm_metal.server.app import create_app
from vllm_metal.server.connection import Connection
from vllm_metal.server.model_manager import ModelManager

logger = logging.getLogger(__name__)

STOPPED = 0
INTERRUPTED = 130

_BACKLOG = 1024

#: How long a connection may stay open without the whole head of a request.
IDLE_S = 120.0


async def serve(
    config: Config,
    manager: ModelManager,
    *,
    on_listening: Callable[[list[str]], None],
    on_ready: Callable[[list[str]], None] = lambda urls: None,
    on_stopping: Callable[[int], None] = lambda exit_code: None,
) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code.

    `on_listening` and, once the model is there, `on_ready` get the URLs; `on_stopping` the exit code, at the
    first signal and at a second that changes it. Raises PortInUse or ConfigError before anything has started,
    and the error that made the manager give up.
    """
    with _signals(on_stopping) as signals:
        async with running(config, manager) as urls:
            on_listening(urls)
            announcing = asyncio.create_task(_call_when(manager.ready, on_ready, urls))
            await _first_of(signals.stop, manager.fatal)
            announcing.cancel()
            draining = asyncio.create_task(manager.drain(config.server.drain_timeout - 2 * _flush_s(config)))
            await _first_of(draining, signals.hurry)
            draining.cancel()
    if manager.fatal.done():
        raise manager.fatal.result()
    return INTERRUPTED if signals.hurry.done() else STOPPED


@asynccontextmanager
async def running(config: Config, manager: ModelManager) -> AsyncIterator[list[str]]:
    """The server, from listening and loading to closing; gives its URLs. Raises PortInUse or ConfigError."""
    server = config.server
    tls = sockets.ssl_context(server)
    bound = sockets.bind(server)
    urls = [sockets.url(sock, tls=tls is not None) for sock in bound]
    runner = web.AppRunner(
        create_app(manager, config), handler_cancellation=True, shutdown_timeout=_flush_s(config)
    )
    # Errors of handlers are ours to log; what is left is traces of bytes that are not HTTP.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    loop = asyncio.get_running_loop()
    listening: list[asyncio.Server] = []

    def connect() -> Connection:
        assert runner.server is not None
        return Connection(
            runner.server,
            loop=loop,
            keepalive_timeout=IDLE_S,
            access_log=None,
        )

    try:
        await runner.setup()
        for sock in bound:
            listening.append(await loop.create_server(connect, sock=sock, ssl=tls, backlog=_BACKLOG))
        manager.start()
        yield urls
    finally:
        await manager.close()
        for server_socket in listening:
            server_socket.close()
        await runner.cleanup()
        sockets.close(bound, server)


def _flush_s(config: Config) -> float:
    """What of `drain_timeout` goes to aiohttp, which waits twice for replies still being written."""
    return min(2.0, config.server.drain_timeout / 4)


async def _call_when(event: asyncio.Event, callback: Callable[[list[str]], None], urls: list[str]) -> None:
    await event.wait()
    callback(urls)


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True, slots=True)
class Signals:
    """`stop` is done at the first SIGTERM or SIGINT, `hurry` at a SIGINT after that."""

    stop: asyncio.Future[None]
    hurry: asyncio.Future[None]
    on_stopping: Callable[[int], None]

    def received(self, number: signal.Signals) -> None:
        if not self.stop.done():
            logger.info("%s: finishing what is under way", number.name)
            self.stop.set_result(None)
            self.on_stopping(STOPPED)
        elif number == signal.SIGINT and not self.hurry.done():
            self.hurry.set_result(None)
            self.on_stopping(INTERRUPTED)


@contextmanager
def _signals(on_stopping: Callable[[int], None]) -> Iterator[Signals]:
    loop = asyncio.get_running_loop()
    signals = Signals(loop.create_future(), loop.create_future(), on_stopping)
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, signals.received, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
