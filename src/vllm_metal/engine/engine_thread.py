"""A model on a thread of its own, spoken to from the event loop: what all kinds of engines have in common."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from vllm_metal.engine.memory_budget import ModelNeed
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.engine.outputs import EngineStats
from vllm_metal.errors import EngineUnavailable

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What computes, on the engine thread."""

    def has_work(self) -> bool: ...
    def pause(self) -> None: ...
    def rest(self) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


CoreT = TypeVar("CoreT", bound=Core)
CoreT_co = TypeVar("CoreT_co", bound=Core, covariant=True)
T = TypeVar("T")


class Loaded(Protocol[CoreT_co]):
    """What loading a model gives, of whatever kind it is."""

    @property
    def core(self) -> CoreT_co: ...
    @property
    def need(self) -> ModelNeed: ...
    @property
    def summary(self) -> ModelSummary | None: ...


LoadedT = TypeVar("LoadedT", bound=Loaded[Any])
HeldT = TypeVar("HeldT")


#: For so long without work memory is held for the next request: getting it anew would take longer than a
#: step.
REST_AFTER_S = 60.0
#: In characters. Shorter ones are encoded in a tenth of a second.
_LONG_TEXT = 1 << 16


@dataclass(frozen=True, slots=True)
class Stop:
    pass


class EngineThread(ABC, Generic[LoadedT, CoreT, HeldT]):
    """Create and use on the event loop. `load` runs on the engine thread, which owns all that it returns.

    `name` is what its model is served as, and HeldT what is held here of a request until it ends.
    """

    def __init__(self, load: Callable[[], LoadedT], *, max_queued: int, name: str) -> None:
        self.name = name
        self._load = load
        self._max_queued = max_queued
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._held: dict[str, HeldT] = {}
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._tokenizing_long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer of long texts")
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._stopping = False
        self._idle_since_s: float | None = None
        self.stats = EngineStats()
        self.need = ModelNeed()
        self.summary: ModelSummary | None = None
        #: Set when the engine can serve no more; the reason, in words.
        self.failure: str | None = None
        self.failed = asyncio.Event()

    async def start(self) -> None:
        """Load the model. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[LoadedT] = self._loop.create_future()
        self._thread.start()
        loaded = await asyncio.shield(self._loaded)
        self.need = loaded.need
        self.summary = loaded.summary
        self._use(loaded)
        self._idle_since_s = self._loop.time()

    async def stop(self) -> None:
        """Abort what runs, free the model on the engine thread and join it."""
        self._stopping = True
        self._end_all(None)
        self._inbox.put(Stop())
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._tokenizing.shutdown(wait=False)
        self._tokenizing_long.shutdown(wait=False)

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._held)

    @property
    def num_running(self) -> int:
        """Requests that are in steps, as far as they have not been read to their end."""
        return min(self.stats.num_running, len(self._held))

    @property
    def num_waiting(self) -> int:
        """All others: one that has only just come is not among the engine's yet."""
        return self.num_streams - self.num_running

    @property
    def idle_s(self) -> float:
        """For how long the model has been loaded and held no request."""
        if self.num_streams or self._idle_since_s is None:
            return 0.0
        return self._loop.time() - self._idle_since_s

    @abstractmethod
    def _use(self, loaded: LoadedT) -> None:
        """Keep what the event loop needs of it."""

    @abstractmethod
    def _deliver(self, outputs: Sequence[Any], stats: EngineStats) -> None:
        """What a step gave, or nothing, when there are new figures only."""

    @abstractmethod
    def _end_all(self, failure: str | None) -> None:
        """End all that is held: the engine has failed, or it stops."""

    def _check_open(self) -> None:
        """Raises EngineUnavailable when the engine has stopped."""
        if self.failure or self._stopping:
            raise EngineUnavailable(self.failure or "the server is shutting down")

    def _tokenizing_of(self, num_characters: int) -> Executor:
        """Where a text of that length is encoded: a long one takes seconds, which no other should wait."""
        return self._tokenizing if num_characters < _LONG_TEXT else self._tokenizing_long

    async def _run_on(self, executor: Executor, action: Callable[[], T]) -> T:
        """What `action` gives. Raises EngineUnavailable when the engine has stopped."""
        self._check_open()
        return await self._loop.run_in_executor(executor, action)

    def _release(self, request_id: str) -> HeldT | None:
        """What was held of a request, if it has not ended before."""
        held = self._held.pop(request_id, None)
        if held is not None and not self._held:
            self._idle_since_s = self._loop.time()
        return held

    def _fail(self, reason: str) -> None:
        """End all with `reason`, and take no more requests."""
        self.failure = reason
        self._end_all(reason)
        self.failed.set()

    # From here on: the engine thread.

    @abstractmethod
    def _step(self, core: CoreT) -> Sequence[Any]:
        """What there is to be delivered after a step."""

    @abstractmethod
    def _apply(self, core: CoreT, message: object) -> None:
        """Do what the event loop has asked for."""

    def _serve(self) -> None:
        try:
            loaded = self._load()
            loaded.core.rest()  # from loading
        except BaseException as exc:
            _drop_locals(exc)
            self._call(self._set_loaded, exc)
            return
        core: CoreT = loaded.core
        self._call(self._set_loaded, loaded)
        del loaded
        try:
            while self._receive(core):
                outputs = self._step(core)
                self._call(self._deliver, outputs, core.stats())
        except Exception as exc:
            logger.exception("the engine failed")
            self._call(self._fail, f"the engine failed: {type(exc).__name__}: {exc}")
        finally:
            core.close()

    def _receive(self, core: CoreT) -> bool:
        """Apply all messages, waiting for one if there is nothing else to do; false on Stop."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                if core.has_work():
                    return True
                message = self._wait(core)
            if isinstance(message, Stop):
                return False
            self._apply(core, message)

    def _wait(self, core: CoreT) -> object:
        """The next message. Meanwhile the device is for others, and before long memory too."""
        core.pause()
        self._call(self._deliver, (), core.stats())
        try:
            return self._inbox.get(timeout=REST_AFTER_S)
        except Empty:
            core.rest()
            self._call(self._deliver, (), core.stats())
            return self._inbox.get()

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("the event loop has closed; dropping %s", callback.__name__)

    def _set_loaded(self, loaded: LoadedT | BaseException) -> None:
        if isinstance(loaded, BaseException):
            self._loaded.set_exception(loaded)
        else:
            self._loaded.set_result(loaded)


def _drop_locals(exc: BaseException | None) -> None:
    """Of all calls that `exc` came through: they hold what had been loaded, and somebody may keep `exc`."""
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__context__
