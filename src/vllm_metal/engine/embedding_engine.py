"""EmbeddingCore on its thread, and the vectors that are waited for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from vllm_metal.engine.embedding_core import EmbeddingCore
from vllm_metal.engine.embedding_request import EmbeddingInput, EmbeddingOutput, EmbeddingRequest
from vllm_metal.engine.embedding_traits import EmbeddingTraits
from vllm_metal.engine.engine_thread import EngineThread
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

#: A text or a pair of them.
T = TypeVar("T", bound=Sequence[str])
U = TypeVar("U")

#: As much is encoded in one go, or a single text: others are encoded in between.
_TEXTS_AT_ONCE = 64
_CHARACTERS_AT_ONCE = 1 << 16
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
    def tokens(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]: ...
    def text(self, token_ids: Sequence[int]) -> str: ...


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

    def end(self, result: Sequence[bytes] | MetalError) -> None:
        if self.vectors.done():
            return  # its caller has just been cancelled
        if isinstance(result, MetalError):
            self.vectors.set_exception(result)
        else:
            self.vectors.set_result(result)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class EmbeddingEngine(EngineThread[LoadedEmbedder, EmbeddingCore, _Held]):
    """For models that embed or compare."""

    purpose = "embeds texts"

    def __init__(self, load: Callable[[], LoadedEmbedder], *, max_queued: int, name: str = "") -> None:
        super().__init__(load, max_queued=max_queued, name=name)
        self._num_encoding = 0

    def _use(self, loaded: LoadedEmbedder) -> None:
        self._encoder = loaded.encoder
        self.traits = loaded.traits
        if self.traits.compares:
            self.purpose = "compares texts"

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

    async def tokens(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Ids and strings. Raises as `encode` does."""
        split = partial(self._encoder.tokens, text, add_special_tokens=add_special_tokens)
        return await self._run_on(self._tokenizing_of(len(text)), split)

    async def text(self, token_ids: Sequence[int], *, param: str) -> str:
        """Raises InvalidRequest for ids of no token."""
        self._check_token_ids(token_ids, param)
        return await self._run_on(self._tokenizing, partial(self._encoder.text, token_ids))

    async def _encoded(self, encode: Callable[[Sequence[T]], list[U]], items: Sequence[T]) -> list[U]:
        results: list[U] = []
        self._num_encoding += 1
        try:
            for some in _pieces(items):
                executor = self._tokenizing_of(sum(map(_num_characters, some)))
                results += await self._run_on(executor, partial(encode, some))
        finally:
            self._num_encoding -= 1
        return results

    @property
    def num_streams(self) -> int:
        return super().num_streams + self._num_encoding

    def check_room(self, num_tokens: int = 0) -> None:
        """Raises EngineBusy where there is no room for one more request, of `num_tokens`, EngineUnavailable
        when the engine has stopped.
        """
        self._check_open()
        if self.num_streams >= self._max_queued:
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
        most = self.max_model_len
        for index, each in enumerate(inputs):
            where = param if len(inputs) == 1 else f"{param}[{index}]"
            if not each.token_ids:
                raise InvalidRequest(f"`{where}` is empty", param=where)
            self._check_token_ids(each.token_ids, where)
            if (num_tokens := len(each.token_ids)) > most:
                raise PromptTooLong(
                    f"this model's maximum context length is {most} tokens; `{where}` has {num_tokens}",
                    param=where,
                    hint="shorten it, or have it cut with `truncate_prompt_tokens: -1`",
                )

    def _check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._encoder.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", param=param)

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
        self._inbox.put(request)
        try:
            async with asyncio.timeout_at(deadline):
                return await vectors
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            if self._release(request.request_id):
                self._inbox.put(_Abort(request.request_id))

    def set_kv_budget(self, num_bytes: int) -> None:
        """It keeps none."""

    def _deliver(self, outputs: Sequence[EmbeddingOutput], stats: EngineStats) -> None:
        self.stats = stats
        for output in outputs:
            if held := self._release(output.request_id):
                held.end(output.vectors if output.error is None else EngineError(output.error))

    def _end_all(self, failure: str | None) -> None:
        error = EngineError(failure) if failure else EngineUnavailable("the server is shutting down")
        for request_id in list(self._held):
            if held := self._release(request_id):
                held.end(error)

    # From here on: the engine thread.

    def _step(self, core: EmbeddingCore) -> list[EmbeddingOutput]:
        return core.step()

    def _apply(self, core: EmbeddingCore, message: object) -> None:
        match message:
            case EmbeddingRequest():
                core.add(message)
            case _Abort(request_id):
                core.abort(request_id)


def _num_characters(item: Sequence[str]) -> int:
    return len(item) if isinstance(item, str) else sum(map(len, item))


def _pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Those that are encoded in one go."""
    start = num_characters = 0
    for position, item in enumerate(items):
        num_characters += _num_characters(item)
        if num_characters >= _CHARACTERS_AT_ONCE or position - start + 1 == _TEXTS_AT_ONCE:
            yield items[start : position + 1]
            start, num_characters = position + 1, 0
    if start < len(items):
        yield items[start:]
