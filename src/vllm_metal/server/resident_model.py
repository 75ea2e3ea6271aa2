"""One model's life on the event loop: on disk, loading, loaded, unloading; who uses it and who waits."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from vllm_metal.config import Config
from vllm_metal.engine.memory_budget import ModelNeed
from vllm_metal.errors import (
    DeadlineExceeded,
    DownloadError,
    EngineError,
    EngineUnavailable,
    InsufficientMemory,
    MetalError,
)
from vllm_metal.hub.names import Source
from vllm_metal.hub.progress import PullProgress, ShowProgress
from vllm_metal.hub.pull import pull
from vllm_metal.hub.store import LocalModel
from vllm_metal.server.model_loader import Measure, ModelLoader, ServingEngine

logger = logging.getLogger(__name__)

Phase = Literal["away", "preparing", "ready", "loading", "loaded", "unloading"]
State = Literal["unloaded", "loading", "ok", "unloading", "failed"]

#: A turn of a model that others wait for lasts this many times as long as loading it took: of the time, a
#: fifth then goes into loads. Who waits for a model is not told to come back within the longest.
_LOADS_A_TURN = 4
_LEAST_TURN_S, _MOST_TURN_S = 2.0, 60.0
_FIRST_RETRY_S = 5.0
_LAST_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no engine. Nobody tries again before `retry_at`, in the loop's time."""

    error: MetalError
    retry_at: float
    retry_s: float

    @property
    def is_passing(self) -> bool:
        return isinstance(self.error, DownloadError) and self.error.retryable

    def for_requests(self, now: float) -> MetalError:
        """An error of its own for each, since one that is raised keeps hold of all that it passes through."""
        if isinstance(self.error, InsufficientMemory):
            return InsufficientMemory(self.error.message, hint=self.error.hint)
        return EngineUnavailable(
            self.error.message, hint=self.error.hint, retry_after_s=max(1, math.ceil(self.retry_at - now))
        )


class ResidentModel:
    """It holds back those who come while it gives way (`is_held`): they wait, as they do while it is loaded,
    for `admit`. `on_change` is called when someone comes or leaves.
    """

    def __init__(
        self,
        name: str,
        source: Source | None,
        config: Config,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.source = source
        self.config = config
        #: Where it lies, once that is known. Found anew for each load, since it may have been updated.
        self.local: LocalModel | None = None
        self.is_pinned = config.models.pinned
        #: Whether it is to be loaded though nobody waits.
        self.is_preloading = False
        self.is_held = False
        #: Those who want it unloaded as soon as nobody uses it.
        self.num_unloads = 0
        #: "ready" is on disk and measured, so that it can be loaded.
        self.phase: Phase = "away"
        #: Set while nothing of it is in memory.
        self.gone = asyncio.Event()
        self.gone.set()
        self.failure: Failure | None = None
        self.engine: ServingEngine | None = None
        self.need: ModelNeed | None = None
        # What its files told that it needs, and what it turned out to need.
        self._told_need, self._true_need = ModelNeed(), ModelNeed()
        self.num_users = 0
        #: Set while nobody uses it.
        self.unused = asyncio.Event()
        self.unused.set()
        self.load_s = 0.0
        self.loaded_at = 0.0
        self.last_used_at = 0.0
        self._keep_s = self._ttl_s = config.models.ttl or math.inf
        self._progress = ""
        self._waiting: dict[asyncio.Future[None], float] = {}
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._closing = False

    @asynccontextmanager
    async def used(
        self, give_up_at: float | None, keep_alive_s: float | None, *, deadline: float | None = None
    ) -> AsyncIterator[ServingEngine]:
        """Its engine, which is not unloaded meanwhile; afterwards it stays for `keep_alive_s`, else as
        configured. Raises EngineUnavailable, or whatever else keeps it away, where there is none by then, and
        DeadlineExceeded where the request's own time, all in the loop's, ends first.
        """
        if not self.is_open:
            await self._wait(give_up_at, deadline)
        else:
            self._enter()
        try:
            assert self.engine is not None
            yield self.engine
        finally:
            self._keep_s = self._ttl_s if keep_alive_s is None else keep_alive_s
            self._leave()

    @property
    def state(self) -> State:
        """For people, as `stage` is."""
        match self.phase:
            case "loaded":
                return "unloading" if self.is_leaving else "ok"
            case "unloading":
                return "unloading"
            case "preparing" | "loading":
                return "loading"
        if self.failure and not self.is_wanted_now:
            return "failed"
        return "loading" if self.is_wanted_now else "unloaded"

    @property
    def stage(self) -> str:
        match self.state:
            case "ok":
                return "ready"
            case "loading":
                return self._progress if self.phase in ("preparing", "loading") else "waits for memory"
            case "unloading":
                return "waits for its requests to end" if self.num_users else "unloading"
            case "failed":
                return "no model"
            case "unloaded":
                return "not loaded"

    @property
    def is_wanted_now(self) -> bool:
        """Whether it is to be loaded, and there is no reason to wait with that."""
        is_waited_for = bool(self._waiting) or self.is_preloading
        return is_waited_for and not (self.failure and self._loop.time() < self.failure.retry_at)

    @property
    def is_leaving(self) -> bool:
        return self.num_unloads > 0

    @property
    def is_open(self) -> bool:
        return self.phase == "loaded" and not self.is_held and not self.is_leaving

    @property
    def is_under_way(self) -> bool:
        return self.phase not in ("away", "ready")

    @property
    def waiting_since(self) -> float | None:
        """When the first of those who wait came."""
        return next(iter(self._waiting.values()), None)

    @property
    def num_requests(self) -> int:
        """Those that run or wait."""
        return len(self._waiting) + (self.engine.num_streams if self.engine else 0)

    @property
    def num_waiting(self) -> int:
        """Those who wait for it, and requests that wait in it."""
        return len(self._waiting) + (self.engine.num_waiting if self.engine else 0)

    @property
    def expires_at(self) -> float:
        """When it has been idle for long enough."""
        if self.is_pinned or self.num_users:
            return math.inf
        return self.last_used_at + self._keep_s

    @property
    def unloads_in_s(self) -> float:
        """From now on, or from when its requests end."""
        if self.num_users and not self.is_pinned:
            return self._keep_s
        return max(0.0, self.expires_at - self._loop.time())

    @property
    def may_give_way_at(self) -> float:
        """When others' wish for its memory goes before its own: after its turn, or when nobody has asked for
        it for as long as loading it took.
        """
        turn_s = min(max(_LEAST_TURN_S, _LOADS_A_TURN * self.load_s), _MOST_TURN_S)
        turn_ends_at = self.loaded_at + turn_s
        return turn_ends_at if self.num_users else min(turn_ends_at, self.last_used_at + self.load_s)

    def admit(self) -> None:
        """Let all who wait use it."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                self._enter()
                future.set_result(None)

    def refuse(self, error: MetalError) -> None:
        """Tell all who wait."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def forgive(self) -> None:
        """Let it be tried again at once, if it was memory that lacked."""
        if self.failure and isinstance(self.failure.error, InsufficientMemory):
            self.failure = None

    def close(self) -> None:
        """Want no download any more."""
        self._closing = True

    async def fetch(self, show_progress: ShowProgress) -> None:
        """Bring it to disk. Raises as `pull` does."""
        assert self.source is not None
        self._progress = f"looking for `{self.source}`"

        def progress(news: PullProgress) -> None:
            if self._closing:
                raise asyncio.CancelledError  # ends the pull, whose thread the exit of the loop waits for
            self._loop.call_soon_threadsafe(setattr, self, "_progress", _in_words(news))
            show(news)

        with show_progress() as show:
            self.local = await asyncio.to_thread(
                pull, self.source, models_dir=self.config.models.store, on_progress=progress
            )

    async def measure(self, loader: ModelLoader) -> Measure:
        """Learn what it needs. Raises as `ModelLoader.measure` does."""
        assert self.local is not None
        self._progress = f"looking at `{self.name}`"
        began_at = self._loop.time()
        measure = await loader.measure(self.local.path, self.config)
        self.load_s = self._loop.time() - began_at
        if measure.need != self._told_need:
            self._told_need = self._true_need = measure.need
        self.need = self._true_need
        self.phase = "ready"
        return measure

    async def load(self, loader: ModelLoader, room_bytes: int) -> ServingEngine:
        """Raises what loading raised."""
        assert self.local is not None
        self._progress = f"loading `{self.local.name}`"
        self.gone.clear()
        engine = loader.engine(self.name, self.local.path, self.config, room_bytes)
        started_at = self._loop.time()
        # From the start, for whoever stops the server meanwhile.
        self.engine = engine
        try:
            await engine.start()
        except Exception:
            self.engine = None
            self.gone.set()
            raise
        self.learn(engine.need)
        self.failure = None
        self.is_preloading = False
        self.loaded_at = self.last_used_at = self._loop.time()
        self.load_s += self.loaded_at - started_at
        self._keep_s = self._ttl_s
        self.phase = "loaded"
        return engine

    def learn(self, need: ModelNeed) -> bool:
        """What it turns out to need. True if that is more than was known."""
        is_more = need.least_bytes > self._true_need.least_bytes
        self.need = self._true_need = need
        return is_more

    def forget(self) -> None:
        """What was measured, since the files may be others when it is wanted again."""
        self.phase, self.need = "away", None

    async def unload(self) -> None:
        """Free its memory; nobody uses it."""
        assert not self.num_users
        await self.stop()
        self.engine = None
        self.is_held = False
        self.forget()
        logger.info("unloaded `%s`", self.name)

    async def stop(self) -> None:
        """Free its memory, whoever uses it."""
        if self.engine is not None:
            await self.engine.stop()
        self.gone.set()

    def fail(self, error: MetalError) -> None:
        """There will be no engine for a while, longer after each failure in a row."""
        retry_s = min(2 * self.failure.retry_s, _LAST_RETRY_S) if self.failure else _FIRST_RETRY_S
        # These keep hold of what had been loaded.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.failure = Failure(error, self._loop.time() + retry_s, retry_s)
        self.forget()
        self.is_preloading &= self.failure.is_passing
        self.refuse(self.failure.for_requests(self._loop.time()))

    async def _wait(self, give_up_at: float | None, deadline: float | None) -> None:
        if self.failure and self._loop.time() < self.failure.retry_at:
            raise self.failure.for_requests(self._loop.time())
        future = self._loop.create_future()
        self._waiting[future] = self._loop.time()
        self._on_change()
        try:
            async with asyncio.timeout_at(deadline), asyncio.timeout_at(give_up_at):
                await future
        except TimeoutError:
            stage = "it gives way to another model" if self.phase == "loaded" else self.stage
            self._give_up(future)
            why = f"`{self.name}` is not ready: {stage}"
            if deadline is not None and deadline <= self._loop.time():
                raise DeadlineExceeded(why) from None
            raise EngineUnavailable(why, retry_after_s=10) from None
        except BaseException:
            self._give_up(future)
            raise

    def _give_up(self, future: asyncio.Future[None]) -> None:
        self._waiting.pop(future, None)
        if future.done() and not future.cancelled() and future.exception() is None:
            self._leave()  # it was admitted in the same moment
        else:
            self._on_change()

    def _enter(self) -> None:
        self.num_users += 1
        self.unused.clear()

    def _leave(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self.unused.set()
        self.last_used_at = self._loop.time()
        self._on_change()


def as_metal_error(exc: Exception) -> MetalError:
    """Of a failed load."""
    if isinstance(exc, MetalError):
        return exc
    return EngineError(f"the model could not be loaded: {type(exc).__name__}: {exc}")


def _in_words(news: PullProgress) -> str:
    if not news.total_bytes:
        return news.stage
    return f"{news.stage} ({100 * news.done_bytes // news.total_bytes} %)"
