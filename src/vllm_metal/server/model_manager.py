"""From a model's name to a running engine: loads models when they are asked for, and unloads them for others.

Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from vllm_metal.config import Config
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.engine.memory_budget import MemoryBudget, TooTight
from vllm_metal.errors import EngineError, EngineUnavailable, InvalidRequest, MetalError
from vllm_metal.hub.progress import ShowProgress, silence
from vllm_metal.server.model_loader import MLXLoader, ModelLoader, ServingEngine
from vllm_metal.server.placement import make_room, needs
from vllm_metal.server.resident_model import Phase, ResidentModel, as_metal_error
from vllm_metal.server.roster import Roster

logger = logging.getLogger(__name__)

#: How long a request waits for its model before it is told to come back.
LOAD_WAIT_S = 120.0

EngineT = TypeVar("EngineT", bound=ServingEngine)


@dataclass(frozen=True, slots=True)
class Health:
    """`stage` is in words, `detail` the reason when `status` is "failed"."""

    status: Literal["ok", "loading", "failed", "draining"]
    stage: str
    detail: str | None = None
    retry_after_s: int = 5


class ModelManager:
    """Serves the default model of the configuration, and every other that is on this machine.

    `persistent` is for a daemon that nobody watches: a default model that cannot be had leaves it up, and it
    tries again where that can help. Otherwise `fatal` ends with the error.

    All is decided in `_place`, whenever something has changed: who is loaded next, first come, first served,
    and who gives way to them. Loads and unloads go one after the other.
    """

    def __init__(
        self,
        config: Config,
        *,
        persistent: bool = False,
        show_progress: ShowProgress = silence,
        loader: ModelLoader | None = None,
    ) -> None:
        self._config = config
        self._persistent = persistent
        self._show_progress = show_progress
        self._loader = loader or MLXLoader()
        self._loop = asyncio.get_running_loop()
        self.roster = Roster(config, on_change=self._place)
        self._budget = MemoryBudget(0, config.engine.gpu_memory_utilization)
        self.created = int(time.time())
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[ResidentModel, asyncio.Task[None]] = {}
        self._is_moving = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._is_closing = False
        self._settled = asyncio.Event()
        #: Set once the default model is there.
        self.ready = asyncio.Event()
        #: Done when the server must end, with the error that ends it.
        self.fatal: asyncio.Future[MetalError] = self._loop.create_future()

    def start(self) -> None:
        """Begin to fetch and load what is to be there from the start; requests may come at once."""
        for name in self._config.model_sections:
            if self._config.for_model(name).models.preload and not self.roster.add_configured(name):
                self._start(self._preload_from_disk(name))
        for model in self.roster.models:
            model.is_preloading = model.config.models.preload
        if not self.roster.default.is_preloading:
            self._settled.set()
            self.ready.set()
        self._place()

    async def _preload_from_disk(self, name: str) -> None:
        try:
            model = await self._find(name)
        except MetalError as exc:
            logger.warning("`%s` is not preloaded: %s", name, in_words(exc))
        else:
            model.is_preloading = True
            self._place()

    def health(self) -> Health:
        """Of the server: whether requests are taken."""
        if self.fatal.done():
            return Health("failed", "stopping", in_words(self.fatal.result()))
        if self._is_draining:
            return Health("draining", "the server is shutting down")
        return Health("ok", "ready")

    def readiness(self) -> Health:
        """Of the default model: whether a request for it would be served, or why not yet."""
        health, model = self.health(), self.roster.default
        if health.status != "ok" or model.state in ("ok", "unloading", "unloaded"):
            return health
        if model.state == "loading":
            return Health("loading", model.stage)
        assert model.failure is not None
        retry_after_s = math.ceil(model.failure.retry_at - self._loop.time())
        return Health("failed", model.stage, in_words(model.failure.error), max(1, retry_after_s))

    async def settled(self) -> None:
        """Wait until the default model is ready or known not to be had."""
        await self._settled.wait()

    @asynccontextmanager
    async def acquire(
        self, name: str | None, *, deadline: float | None = None, keep_alive_s: float | None = None
    ) -> AsyncIterator[AsyncEngine]:
        """The engine that answers to `name`, or to no name; while it is held the model stays loaded.

        `deadline` is in the loop's time. Raises ModelNotFound for a name that is not served; InvalidRequest
        for a model that generates no text; EngineUnavailable, with when to come back, while there is no
        engine; DeadlineExceeded where there is none by then; InsufficientMemory where there never can be one.
        """
        async with self.acquire_a(AsyncEngine, name, deadline=deadline, keep_alive_s=keep_alive_s) as engine:
            yield engine

    @asynccontextmanager
    async def acquire_a(
        self,
        kind: type[EngineT],
        name: str | None,
        *,
        deadline: float | None = None,
        keep_alive_s: float | None = None,
    ) -> AsyncIterator[EngineT]:
        """As `acquire`, for an engine of another kind."""
        model = await self._find(name)
        # Before it is loaded, if it is known by then.
        if model.local is not None and model.engine is None:
            _check_kind(model, self._loader.engine_type(model.local.path), kind)
        async with model.used(self._give_up_at(), keep_alive_s, deadline=deadline) as engine:
            _check_kind(model, type(engine), kind)
            assert isinstance(engine, kind)
            yield engine

    @asynccontextmanager
    async def acquire_any(self, name: str | None) -> AsyncIterator[ServingEngine]:
        """As `acquire`, whatever its model is for."""
        model = await self._find(name)
        async with model.used(self._give_up_at(), None) as engine:
            yield engine

    async def load(self, name: str | None, keep_alive_s: float | None) -> ResidentModel:
        """Have it loaded. Raises as `acquire` does."""
        model = await self._find(name)
        async with model.used(None, keep_alive_s):
            return model

    async def unload(self, name: str | None) -> ResidentModel:
        """Have it unloaded when the requests that use it have ended; those that come later wait, and have it
        loaded again. Raises ModelNotFound.
        """
        model = await self._find(name)
        if model.phase == "loading":
            with suppress(MetalError):
                async with model.used(None, None):
                    pass
        model.num_unloads += 1
        self._place()
        try:
            await model.gone.wait()
        finally:
            # Whoever asked for it may have left before that.
            model.num_unloads -= 1
            self._place()
        return model

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait, up to `timeout_s`, for those under way."""
        self._is_draining = True
        self._settled.set()
        for model in self.roster.models:
            model.refuse(EngineUnavailable("the server is shutting down"))
        if num_users := sum(model.num_users for model in self.roster.models):
            logger.info("waiting for %d request%s to finish", num_users, "" if num_users == 1 else "s")
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    for model in self.roster.models:
                        await model.unused.wait()

    async def close(self) -> None:
        """Stop fetching and loading, and free the engines."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for model in self.roster.models:
            model.close()
        tasks = [*self._tasks, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(model.stop() for model in self.roster.models))

    async def _find(self, name: str | None) -> ResidentModel:
        self._require_open()
        model = await self.roster.find(name)
        self._require_open()
        return model

    def _require_open(self) -> None:
        health = self.health()
        if health.status != "ok":
            raise EngineUnavailable(health.detail or health.stage)

    def _loaded(self) -> list[ResidentModel]:
        return [model for model in self.roster.models if model.phase == "loaded"]

    def _give_up_at(self) -> float:
        return self._loop.time() + LOAD_WAIT_S

    def _place(self) -> None:
        """Do what can be done now for models that are asked for, and come back when there is more."""
        if self._is_closing or self._is_draining:
            return
        now, times = self._loop.time(), list[float]()
        loaded = self._loaded()
        for model in loaded:
            if not model.num_users and (model.is_leaving or model.expires_at <= now):
                self._unload(model)
            times.append(model.expires_at)
        for model in self.roster.models:
            if model.phase == "away" and model.is_wanted_now:
                self._prepare(model)
            elif model.phase == "ready" and not model.is_wanted_now:
                model.forget()
            elif model.is_preloading and model.failure:
                times.append(model.failure.retry_at)
        held = self._make_room(now, times)
        for model in loaded:
            model.is_held = model in held
            if model.is_open:
                model.admit()
        if self._timer is not None:
            self._timer.cancel()
        if (next_time := min((each for each in times if each > now), default=math.inf)) < math.inf:
            self._timer = self._loop.call_at(next_time, self._place)

    def _make_room(self, now: float, times: list[float]) -> list[ResidentModel]:
        """Load the next that waits, or unload others for it. Returns those that are held back until then, and
        adds to `times` when more may be.
        """
        waiting = [model for model in self.roster.models if model.phase == "ready" and model.is_wanted_now]
        while waiting and not any(model.phase == "loading" for model in self.roster.models):
            head = min(waiting, key=lambda model: model.waiting_since or 0.0)
            try:
                going = make_room(head, self._loaded(), self._budget, now)
            except MetalError as exc:
                self._fail(head, exc)
                waiting.remove(head)
                continue
            if not going:
                self._load(head)
            times += (model.may_give_way_at for model in going)
            held = [model for model in going if model.may_give_way_at <= now]
            for model in held:
                if not model.num_users and self._unload(model):
                    logger.info("unloading `%s` to make room for `%s`", model.name, head.name)
            return held
        return []

    def _prepare(self, model: ResidentModel) -> None:
        """Bring it to disk and measure it."""
        model.phase = "preparing"

        async def prepare() -> None:
            try:
                if model.source is not None:
                    await model.fetch(self._show_progress)
                measure = await model.measure(self._loader)
            except Exception as exc:
                self._fail(model, exc)
            else:
                self._budget = replace(self._budget, device_bytes=measure.device_bytes)
            self._place()

        self._start(prepare())

    def _load(self, model: ResidentModel) -> bool:
        """False while another is loaded or unloaded: then its turn comes."""

        async def load() -> None:
            try:
                engine = await model.load(self._loader, self._share_memory(model))
            except Exception as exc:
                if isinstance(exc, TooTight) and model.learn(exc.need):
                    model.phase = "ready"  # others may give way to it yet
                else:
                    self._fail(model, exc)
                return
            self._watches[model] = asyncio.create_task(self._watch(engine))
            if model is self.roster.default:
                self._settled.set()
                self.ready.set()

        return self._move(model, "loading", load)

    def _unload(self, model: ResidentModel) -> bool:
        """As `_load` says. Nobody uses the model."""

        async def unload() -> None:
            self._watches.pop(model).cancel()
            await model.unload()
            if model.is_pinned:
                for other in self.roster.models:
                    other.forgive()

        return self._move(model, "unloading", unload)

    def _move(
        self, model: ResidentModel, phase: Phase, action: Callable[[], Coroutine[Any, Any, None]]
    ) -> bool:
        if self._is_moving:
            return False
        # At once, so that nobody who comes meanwhile takes it for another.
        self._is_moving, model.phase = True, phase

        async def move() -> None:
            try:
                await action()
            finally:
                self._is_moving = False
            self._share_memory()
            self._place()

        self._start(move())
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _share_memory(self, newcomer: ResidentModel | None = None) -> int:
        """Tell engines how much KV they may hold; returns how much the newcomer may take in all."""
        loaded = self._loaded()
        all_needs = needs([*loaded, newcomer] if newcomer else loaded)
        shares = self._budget.kv_shares(all_needs)
        for model, share in zip(loaded, shares, strict=False):
            if model.engine is not None:
                model.engine.set_kv_budget(share)
        if newcomer is None:
            return 0
        # Only one steps at a time, so what is kept for the largest step is for its steps, too.
        return shares[-1] + all_needs[-1].weight_bytes + max(need.step_bytes for need in all_needs)

    async def _watch(self, engine: ServingEngine) -> None:
        """An engine that can serve no more ends the process: whatever is wrong may be wrong for all."""
        await engine.failed.wait()
        self._die(EngineError(engine.failure or "the engine failed"))

    def _fail(self, model: ResidentModel, exc: Exception) -> None:
        if isinstance(exc, MetalError):
            logger.error("%s", exc.message)
        else:
            logger.exception("`%s` could not be loaded", model.name, exc_info=exc)
        error = as_metal_error(exc)
        model.fail(error)
        if model is self.roster.default and not self._settled.is_set():
            self._settled.set()
            if not self._persistent or error is not exc:
                self._die(error)

    def _die(self, error: MetalError) -> None:
        if not self.fatal.done():
            self.fatal.set_result(error)
        for model in self.roster.models:
            model.refuse(EngineUnavailable(in_words(error)))


def _check_kind(model: ResidentModel, has: type[ServingEngine], wanted: type[ServingEngine]) -> None:
    if not issubclass(has, wanted):
        raise InvalidRequest(
            f"the model `{model.name}` {has.purpose}, which is not what is asked for",
            param="model",
            hint="`GET /v1/models` lists others",
        )


def in_words(exc: MetalError) -> str:
    return f"{exc.message}; {exc.hint}" if exc.hint else exc.message
