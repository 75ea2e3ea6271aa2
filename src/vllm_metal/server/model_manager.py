"""From a model's name to a running engine: fetched, loaded, served, drained. Lives on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from vllm_metal.config import Config
from vllm_metal.engine.async_engine import AsyncEngine, LoadedEngine
from vllm_metal.errors import DownloadError, EngineError, EngineUnavailable, MetalError, ModelNotFound
from vllm_metal.hub.names import HubSource, Source, configured_source
from vllm_metal.hub.progress import PullProgress, ShowProgress, silence
from vllm_metal.hub.pull import pull
from vllm_metal.hub.store import LocalModel

logger = logging.getLogger(__name__)

#: How long a request waits for a model that is being loaded before it is told to come back.
LOAD_WAIT_S = 60.0
_FIRST_RETRY_S = 5.0
_LAST_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class Health:
    """`stage` is in words, `detail` the reason when `status` is "failed"."""

    status: Literal["ok", "loading", "failed", "draining"]
    stage: str
    detail: str | None = None
    retry_after_s: int = 5


class ModelManager:
    """Serves the one model of the configuration.

    `persistent` is for a daemon that nobody watches: a model that cannot be had leaves it up, unhealthy and
    with the reason, trying again where that can help. Otherwise `fatal` ends with the error.
    """

    def __init__(
        self, config: Config, *, persistent: bool = False, show_progress: ShowProgress = silence
    ) -> None:
        self._config = config
        self._persistent = persistent
        self._show_progress = show_progress
        self._source = configured_source(config.models)
        self.served_names = list(config.models.served_names) or [_served_name(self._source)]
        # Who named a path or a revision to the server may name it so in requests too.
        self._accepted = {*self.served_names}
        if not config.models.served_names:
            self._accepted |= {config.models.default, str(self._source)}
        self.created = int(time.time())
        self.engine: AsyncEngine | None = None
        #: Where the model lies, once it is there.
        self.path: Path | None = None
        self._health = Health("loading", "starting")
        self._settled = asyncio.Event()
        #: Set once the model is there.
        self.ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        #: Done when the server must end, with the error that ends it.
        self.fatal: asyncio.Future[MetalError] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Begin to fetch and load; requests may come at once."""
        self._task = asyncio.create_task(self._run(), name="model")

    def health(self) -> Health:
        return self._health

    async def settled(self) -> None:
        """Wait until the model is ready or known not to be had."""
        await self._settled.wait()

    @asynccontextmanager
    async def acquire(self, name: str | None, *, deadline: float | None = None) -> AsyncIterator[AsyncEngine]:
        """The engine that answers to `name`, or to no name. `deadline` is in the loop's time.

        Raises ModelNotFound for a name that is not served; EngineUnavailable, with when to come back, while
        there is no engine.
        """
        if name and name not in self._accepted:
            raise ModelNotFound(
                f"the model `{name}` is not served here",
                hint=f"served: {', '.join(f'`{served}`' for served in self.served_names)}; "
                "`model` may be left out",
            )
        give_up_at = asyncio.get_running_loop().time() + LOAD_WAIT_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(give_up_at, deadline or give_up_at)):
                await self.settled()
        if self._health.status != "ok" or self.engine is None:
            health = self._health
            raise EngineUnavailable(health.detail or health.stage, retry_after_s=health.retry_after_s)
        yield self.engine

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait, up to `timeout_s`, for those under way."""
        self._health = Health("draining", "the server is shutting down")
        self._settled.set()
        if self.engine is not None and self.engine.num_streams:
            num_streams = self.engine.num_streams
            logger.info("waiting for %d request%s to finish", num_streams, "" if num_streams == 1 else "s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.engine.idle.wait(), timeout_s)

    async def close(self) -> None:
        """Stop fetching and loading, and free the engine."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self.engine is not None:
            await self.engine.stop()

    async def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                local = await self._fetch()
                self.path = local.path
                self._set(Health("loading", f"loading `{local.name}`"))
                engine = AsyncEngine(
                    partial(_build, local, self._config),
                    max_queued=self._config.server.max_queued,
                    seed=self._config.engine.seed,
                )
                self.engine = engine
                await engine.start()
            except MetalError as exc:
                self.engine = None
                if not self._persistent:
                    self._die(exc)
                    return
                logger.error("%s", exc.message)
                retryable = isinstance(exc, DownloadError) and exc.retryable
                self._set(
                    Health("failed", "no model", _in_words(exc), int(retry_s) if retryable else 60),
                    settled=True,
                )
                if not retryable:
                    return
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            except Exception as exc:
                logger.exception("the model could not be loaded")
                self.engine = None
                self._die(EngineError(f"the model could not be loaded: {type(exc).__name__}: {exc}"))
                return
            else:
                break
        self._set(Health("ok", "ready"), settled=True)
        self.ready.set()
        await engine.failed.wait()
        self._die(EngineError(engine.failure or "the engine failed"))

    async def _fetch(self) -> LocalModel:
        self._set(Health("loading", f"looking for `{self._source}`"))
        loop = asyncio.get_running_loop()

        def progress(news: PullProgress) -> None:
            if self._closing:
                raise asyncio.CancelledError  # ends the pull, whose thread the exit of the loop waits for
            loop.call_soon_threadsafe(self._set, Health("loading", _stage(news)))
            show(news)

        with self._show_progress() as show:
            return await asyncio.to_thread(
                pull, self._source, models_dir=self._config.models.store, on_progress=progress
            )

    def _set(self, health: Health, *, settled: bool = False) -> None:
        if self._health.status == "draining":
            return
        self._health = health
        if settled:
            self._settled.set()
        else:
            self._settled.clear()

    def _die(self, exc: MetalError) -> None:
        self._set(Health("failed", "stopping", _in_words(exc)), settled=True)
        if not self.fatal.done():
            self.fatal.set_result(exc)


def _served_name(source: Source) -> str:
    """What the user called it: a repository or alias by name, a path by its last part."""
    match source:
        case HubSource(repo):
            return repo
        case _:
            return str(source).rsplit("/", 1)[-1].removesuffix(".gguf")


def _stage(news: PullProgress) -> str:
    if not news.total_bytes:
        return news.stage
    return f"{news.stage} ({100 * news.done_bytes // news.total_bytes} %)"


def _in_words(exc: MetalError) -> str:
    return f"{exc.message}; {exc.hint}" if exc.hint else exc.message


def _build(local: LocalModel, config: Config) -> LoadedEngine:
    # Here and not above: the import takes seconds, and the port must open before.
    from vllm_metal.engine.mlx.build import build

    return build(local.path, config)
