"""EmbeddingCore on a thread of its own, spoken to from the event loop, like `async_engine.py`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from vllm_metal.engine.embedding_core import EmbeddingCore
from vllm_metal.engine.embedding_request import EmbeddingInput, EmbeddingOutput, EmbeddingRequest
from vllm_metal.engine.embedding_traits import EmbeddingTraits
from vllm_metal.engine.memory_budget import ModelNeed
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.engine.outputs import EngineStats
from vllm_metal.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    MetalError,
    PromptTooLong,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

#: Texts that are encoded in one go: others are encoded in between.
_TEXTS_AT_ONCE = 64
#: What requests that are held may have together; a single one may have more.
_MAX_QUEUED_TOKENS = 1 << 21


class Encoder(Protocol):
    """From texts to inputs; see `engine/mlx/embedding_tokenizer.py`. `max_tokens` None means no cut."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, texts: Sequence[str], max_tokens: int | None) -> list[EmbeddingInput]: ...
    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> list[EmbeddingInput]: ...
    def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class LoadedEmbedder:
    """What loading an embedding model gives."""

    core: EmbeddingCore
    encoder: Encoder
    traits: EmbeddingTraits
    need: ModelNeed = field(default_factory=ModelNeed)
    summary: ModelSummary | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that has not ended."""

    num_tokens: int
    vectors: asyncio.Future[Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = EmbeddingRequest | _Abort | _Stop


class EmbeddingEngine:
    """Create and use on the event loop. `load` runs on the engine thread, which owns all that it returns.

    `name` is what its model is served as.
    """

    purpose = "embeds texts"

    def __init__(self, load: Callable[[], LoadedEmbedder], *, max_queued: int, name: str = "") -> None:
        self.name = name
        self._load = load
        self._max_queued = max_queued
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._held: dict[str, _Held] = {}
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._thread = threading.Thread(target=self._run, name="embedding engine", daemon=True)
        self._stopping = False
        self.stats = EngineStats()
        self.summary: ModelSummary | None = None
        self._idle_since_s: float | None = None
        #: Set while no request is held.
        self.idle = asyncio.Event()
        self.idle.set()
        #: Set when the engine can serve no more; the reason, in words.
        self.failure: str | None = None
        self.failed = asyncio.Event()

    async def start(self) -> None:
        """Load the model. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[LoadedEmbedder] = self._loop.create_future()
        self._thread.start()
        loaded = await asyncio.shield(self._loaded)
        self._encoder = loaded.encoder
        self.traits = loaded.traits
        self.need = loaded.need
        self.summary = loaded.summary
        if self.traits.compares:
            self.purpose = "compares texts"
        self._idle_since_s = self._loop.time()

    @property
    def max_model_len(self) -> int:
        return self.traits.max_model_len

    async def encode(self, texts: Sequence[str], *, max_tokens: int | None = None) -> list[EmbeddingInput]:
        """The inputs of `texts`, cut to `max_tokens` each, or as long as they are.

        Raises InvalidRequest for a text that is not valid Unicode.
        """
        return await self._encoded(partial(self._encoder.encode, max_tokens=max_tokens), texts)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_tokens: int | None = None
    ) -> list[EmbeddingInput]:
        """The inputs of pairs that are to be compared; of each the second is cut.

        Raises as `encode` does, and InvalidRequest where the first leaves no room for the second.
        """
        return await self._encoded(partial(self._encoder.encode_pairs, max_tokens=max_tokens), pairs)

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """What the first `max_tokens` of each stand for. Raises as `encode` does."""
        return await self._encoded(partial(self._encoder.cut, max_tokens=max_tokens), texts)

    async def _encoded(self, encode: Callable[[Sequence[T]], list[U]], items: Sequence[T]) -> list[U]:
        results: list[U] = []
        for start in range(0, len(items), _TEXTS_AT_ONCE):
            some = items[start : start + _TEXTS_AT_ONCE]
            results += await self._loop.run_in_executor(self._tokenizing, encode, some)
        return results

    def check_room(self, num_tokens: int = 0) -> None:
        """Raises EngineBusy where there is no room for one more request, of `num_tokens`, EngineUnavailable
        when the engine has stopped.
        """
        if self.failure or self._stopping:
            raise EngineUnavailable(self.failure or "the server is shutting down")
        if len(self._held) >= self._max_queued:
            raise EngineBusy(f"the queue is full: no more than {self._max_queued} may run or wait at once")
        if (
            self._held
            and sum(held.num_tokens for held in self._held.values()) + num_tokens > _MAX_QUEUED_TOKENS
        ):
            raise EngineBusy(f"the queue is full: no more than {_MAX_QUEUED_TOKENS} tokens may wait at once")

    def check(self, inputs: Sequence[EmbeddingInput], param: str) -> None:
        """Raises InvalidRequest or PromptTooLong for what can never be computed; its sender calls the inputs
        `param`.
        """
        most, vocab_size = self.max_model_len, self._encoder.vocab_size
        for index, each in enumerate(inputs):
            where = param if len(inputs) == 1 else f"{param}[{index}]"
            if not each.token_ids:
                raise InvalidRequest(f"`{where}` is empty", param=where)
            if not 0 <= min(each.token_ids) <= max(each.token_ids) < vocab_size:
                raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", param=where)
            if (num_tokens := len(each.token_ids)) > most:
                raise PromptTooLong(
                    f"this model's maximum context length is {most} tokens; `{where}` has {num_tokens}",
                    param=where,
                    hint="shorten it, or have it cut with `truncate_prompt_tokens: -1`",
                )

    async def compute(
        self, inputs: Sequence[EmbeddingInput], *, deadline: float | None = None
    ) -> Sequence[bytes]:
        """A float32 vector for each of `inputs`, which `check` has passed. Given up when the caller is
        cancelled, and at `deadline`, in the loop's time.

        Raises as `check_room` does, DeadlineExceeded, and EngineError where the model fails.
        """
        request = EmbeddingRequest(f"embd-{secrets.token_hex(8)}", inputs)
        self.check_room(request.num_tokens)
        vectors: asyncio.Future[Sequence[bytes]] = self._loop.create_future()
        self._held[request.request_id] = _Held(request.num_tokens, vectors)
        self.idle.clear()
        self._inbox.put(request)
        try:
            async with asyncio.timeout_at(deadline):
                return await vectors
        except TimeoutError:
            raise DeadlineExceeded("the request did not end within its time limit") from None
        finally:
            if self._forget(request.request_id) is not None:
                self._inbox.put(_Abort(request.request_id))

    def set_kv_budget(self, num_bytes: int) -> None:
        """It keeps none."""

    async def stop(self) -> None:
        """Abort what runs, free the model on the engine thread and join it."""
        self._stopping = True
        self._end_all(EngineUnavailable("the server is shutting down"))
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._tokenizing.shutdown()

    @property
    def num_streams(self) -> int:
        return len(self._held)

    @property
    def num_running(self) -> int:
        return min(self.stats.num_running, self.num_streams)

    @property
    def num_waiting(self) -> int:
        return self.num_streams - self.num_running

    @property
    def idle_s(self) -> float:
        """For how long the model has been loaded and held no request."""
        if self._held or self._idle_since_s is None:
            return 0.0
        return self._loop.time() - self._idle_since_s

    def _forget(self, request_id: str) -> asyncio.Future[Sequence[bytes]] | None:
        """What is still to be told of a request, if it has not ended before."""
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        if not self._held:
            self.idle.set()
            self._idle_since_s = self._loop.time()
        return held.vectors

    def _deliver(self, outputs: Sequence[EmbeddingOutput], stats: EngineStats) -> None:
        self.stats = stats
        for output in outputs:
            vectors = self._forget(output.request_id)
            # A caller that has just been cancelled has cancelled it.
            if vectors is None or vectors.done():
                continue
            if output.error is None:
                vectors.set_result(output.vectors)
            else:
                vectors.set_exception(EngineError(output.error))

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._end_all(EngineError(reason))
        self.failed.set()

    def _end_all(self, exc: MetalError) -> None:
        for request_id in list(self._held):
            vectors = self._forget(request_id)
            if vectors is not None and not vectors.done():
                vectors.set_exception(exc)

    # From here on: the engine thread.

    def _run(self) -> None:
        try:
            loaded = self._load()
        except BaseException as exc:
            self._call(self._set_loaded, exc)
            return
        core = loaded.core
        self._call(self._set_loaded, loaded)
        del loaded
        try:
            while self._receive(core):
                if outputs := core.step():
                    self._call(self._deliver, outputs, core.stats())
        except Exception as exc:
            logger.exception("the engine failed")
            self._call(self._fail, f"the engine failed: {type(exc).__name__}: {exc}")
        finally:
            core.close()

    def _receive(self, core: EmbeddingCore) -> bool:
        """Apply all messages, waiting for one if there is nothing else to do; false on a stop."""
        if not core.has_work() and self._inbox.empty():
            core.rest()
        while True:
            try:
                message = self._inbox.get(block=not core.has_work())
            except Empty:
                return True
            match message:
                case EmbeddingRequest():
                    core.add(message)
                case _Abort(request_id):
                    core.abort(request_id)
                case _Stop():
                    return False

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("the event loop has closed; dropping %s", callback.__name__)

    def _set_loaded(self, loaded: LoadedEmbedder | BaseException) -> None:
        if isinstance(loaded, BaseException):
            self._loaded.set_exception(loaded)
        else:
            self._loaded.set_result(loaded)
