"""EngineCore on its thread, and the streams of what it writes. The only place where thread and loop meet."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from vllm_metal.engine.core import EngineCore
from vllm_metal.engine.engine_thread import EngineThread
from vllm_metal.engine.memory_budget import ModelNeed
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.engine.outputs import EngineStats, FinishReason, RequestOutput
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import DeadlineExceeded, EngineBusy, InvalidRequest, PromptTooLong
from vllm_metal.parsing.output_formats import OutputFormats
from vllm_metal.structure.compiler import CompiledGrammar, Compiler
from vllm_metal.structure.grammar import Grammar

logger = logging.getLogger(__name__)


class TokenBytes(Protocol):
    """The bytes that tokens add to a text, and what those are called that add none."""

    def __getitem__(self, token_id: int) -> bytes: ...
    def spelling(self, token_id: int) -> bytes: ...


class Tokenizer(Protocol):
    """What requests need of a tokenizer; see `engine/mlx/tokenizer.py`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def token_bytes(self) -> TokenBytes: ...
    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        only_end: bool = False,
        param: str = ...,
    ) -> list[int]: ...
    def encode_around(self, before: str, after: str, *, max_tokens: int | None = None) -> list[int]: ...
    def render_chat(self, messages: list[dict[str, Any]], **variables: Any) -> str: ...
    def render_request_template(
        self, chat_template: str, messages: list[dict[str, Any]], **variables: Any
    ) -> str: ...
    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_ids(self, tokens: Iterable[str]) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What loading a model gives. `max_model_len` counts prompt and answer tokens together;
    `most_model_len` is what it may grow to when there is more memory, if not the same. No answer has more
    than `max_output_tokens`, if that is not 0.

    `sampling_defaults` are the model's own values for SamplingParams, where a request leaves them open,
    `formats` are those of its answers, and `adapters` the names of its LoRA adapters, in order.
    """

    core: EngineCore
    tokenizer: Tokenizer
    max_model_len: int
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    summary: ModelSummary | None = None
    formats: OutputFormats = field(default_factory=OutputFormats)
    grammars: Compiler | None = None
    need: ModelNeed = field(default_factory=ModelNeed)
    most_model_len: int = 0
    max_output_tokens: int = 0
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRequest:
    """`prompt_param` is what its sender calls the prompt, for errors."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt_param: str = "prompt"


@dataclass(frozen=True, slots=True)
class AddRequest:
    request: Request
    reports_progress: bool


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class SetKVBudget:
    num_bytes: int


class RequestStream:
    """The outputs of requests that belong together, for one reader. Leaving it early aborts those that run.

    It holds one output of each: what arrives before the reader comes back is merged into it, unless it has
    log probabilities, since only apart do outputs tell which text those are of. Past its deadline, if it has
    one, reading raises DeadlineExceeded.
    """

    def __init__(self, requests: Sequence[NewRequest], close: Callable[[str], None]) -> None:
        self.requests = requests
        self._close = close
        self._running = {request.request_id for request in requests}
        self._outputs: dict[str, deque[RequestOutput]] = {}
        self._arrived = asyncio.Event()
        self._expired = False
        self._expiry: asyncio.TimerHandle | None = None

    def expire_at(self, deadline: float) -> None:
        """`deadline` is in the loop's time."""
        self._expiry = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._arrived.set()

    def put(self, output: RequestOutput) -> None:
        held = self._outputs.setdefault(output.request_id, deque())
        if held and not output.logprobs:
            held[-1].merge(output)
        else:
            held.append(output)
        self._arrived.set()

    def end(self, request_id: str) -> None:
        """Want no more of a request, which may have ended by itself."""
        self._close(request_id)
        self._outputs.pop(request_id, None)
        self._running.discard(request_id)

    @property
    def ended(self) -> bool:
        """Whether the last output of every request has been read."""
        return not self._running

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        for request_id in self._running:
            self._close(request_id)

    def __aiter__(self) -> AsyncIterator[list[RequestOutput]]:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        """At most one output of each request, the first that it holds."""
        if self.ended:
            raise StopAsyncIteration
        if not self._expired:
            await self._arrived.wait()
            self._arrived.clear()
        outputs = [held.popleft() for held in self._outputs.values()]
        self._outputs = {request_id: held for request_id, held in self._outputs.items() if held}
        if self._outputs:
            self._arrived.set()
        if not outputs:
            raise DeadlineExceeded
        self._running.difference_update(output.request_id for output in outputs if output.finished)
        return outputs


class AsyncEngine(EngineThread[LoadedEngine, EngineCore, RequestStream]):
    """For models that write."""

    purpose = "generates text"

    def __init__(
        self,
        load: Callable[[], LoadedEngine],
        *,
        max_queued: int,
        seed: int | None = None,
        name: str = "",
    ) -> None:
        super().__init__(load, max_queued=max_queued, name=name)
        self._seed = seed
        self._num_seeds_given = 0
        self._rendering = ThreadPoolExecutor(2, thread_name_prefix="request template")
        self._reporting: set[str] = set()
        self._grammars: Compiler | None = None

    def _use(self, loaded: LoadedEngine) -> None:
        self._tokenizer = loaded.tokenizer
        self.token_bytes = loaded.tokenizer.token_bytes
        self.max_model_len = loaded.max_model_len
        self._most_model_len = max(loaded.max_model_len, loaded.most_model_len)
        self._max_output_tokens = loaded.max_output_tokens
        self.sampling_defaults = loaded.sampling_defaults
        self.formats = loaded.formats
        self._adapters = {name: adapter for adapter, name in enumerate(loaded.adapters, 1)}
        self._grammars = loaded.grammars

    def answers_as(self, model: str | None) -> str:
        """What a request for `model` hears that has answered it: an adapter of that name, or this model."""
        return model if model and model in self._adapters else self.name

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, only_end: bool = False, param: str = "prompt"
    ) -> list[int]:
        """Raises PromptTooLong for a text too long to be worth the work, unless `only_end` is wanted."""
        encode = partial(
            self._tokenizer.encode,
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=self.max_model_len,
            only_end=only_end,
            param=param,
        )
        return await self._run_on(self._tokenizing_of(len(text)), encode)

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each of `words` as it begins a text, and as it stands behind a space. Raises InvalidRequest."""

        def encode() -> tuple[tuple[int, ...], ...]:
            spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
            encode_one = partial(self._tokenizer.encode, add_special_tokens=False, param="bad_words")
            return tuple({tuple(encode_one(spelling)): None for spelling in spellings})

        return await self._run_on(self._tokenizing_of(sum(map(len, words))), encode)

    async def encode_around(self, before: str, after: str) -> list[int]:
        """The prompt for what stands between two texts. Raises InvalidRequest where the model cannot, and as
        `encode` does.
        """
        encode = partial(self._tokenizer.encode_around, before, after, max_tokens=self.max_model_len)
        return await self._run_on(self._tokenizing_of(len(before) + len(after)), encode)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        only_end: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """`chat_template` stands in for the model's own.

        Raises InvalidRequest when the template refuses the messages, and as `encode` does.
        """
        if chat_template is None:
            render = partial(self._tokenizer.render_chat, messages, **template_kwargs)
            text = await self._run_on(self._tokenizing, render)
        else:
            render = partial(
                self._tokenizer.render_request_template, chat_template, messages, **template_kwargs
            )
            # Not where others tokenize, since a template may take its time.
            text = await self._run_on(self._rendering, render)
        return await self.encode(
            text, add_special_tokens=add_special_tokens, only_end=only_end, param="messages"
        )

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool, param: str = "prompt") -> str:
        """The text of `token_ids`. Raises InvalidRequest for ids of no token."""
        self._check_token_ids(param, token_ids)
        decode = partial(self._tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._run_on(self._tokenizing, decode)

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest as `Compiler.compile` does."""
        return await self._compiler(grammar.param).compile(grammar)

    async def literal(self, param: str) -> Callable[[str], str]:
        """Makes Lark of texts; raises InvalidRequest, both as `Compiler.literal` does."""
        return await self._compiler(param).literal(param)

    def _compiler(self, param: str) -> Compiler:
        if self._grammars is None:
            raise InvalidRequest("this model's answers cannot be held to a grammar", param=param)
        return self._grammars

    def token_ids(self, tokens: Iterable[str]) -> frozenset[int]:
        """The ids of those of `tokens` that the vocabulary has."""
        return self._tokenizer.token_ids(tokens)

    def check_room(self, num_requests: int) -> None:
        """Raises InvalidRequest for more requests than can ever be held at once, EngineBusy when there is no
        room for so many now, EngineUnavailable when the engine has stopped.
        """
        self._check_open()
        if num_requests > self._max_queued:
            raise InvalidRequest(
                f"{num_requests} answers are wanted, and the server holds no more than {self._max_queued}",
                param="n",
                hint="ask for fewer at once, or raise `server.max_queued`",
            )
        if len(self._held) + num_requests > self._max_queued:
            raise EngineBusy(f"the queue is full: no more than {self._max_queued} may run or wait at once")

    def add_requests(
        self,
        requests: Sequence[NewRequest],
        *,
        model: str | None = None,
        deadline: float | None = None,
        reports_progress: bool = False,
    ) -> RequestStream:
        """Hand requests to the engine, all or none. Its LoRA adapter named `model` answers, or else the model
        without any. At `deadline`, in the loop's time, the requests are given up. Those that report
        their progress have outputs before their first token too.

        Raises InvalidRequest or PromptTooLong for one that can never run, and as `check_room` does.
        """
        self.check_room(len(requests))
        for request in requests:
            self._check_prompt(request.prompt_token_ids, request.prompt_param)
            self._check_token_ids("allowed_token_ids", request.params.allowed_token_ids or ())
            self._check_token_ids("logit_bias", [token_id for token_id, _ in request.params.logit_bias])
        adapter = self._adapters.get(model or "", 0)
        stream = RequestStream(requests, self._close_stream)
        if deadline is not None:
            stream.expire_at(deadline)
        for request in requests:
            self._held[request.request_id] = stream
            self._inbox.put(AddRequest(self._begin(request, adapter), reports_progress))
        return stream

    def _begin(self, request: NewRequest, adapter: int) -> Request:
        params = request.params
        left = self.max_model_len - len(request.prompt_token_ids)
        left = min(left, self._max_output_tokens or left)
        return Request(
            request.request_id,
            request.prompt_token_ids,
            params,
            max_tokens=left if params.max_tokens is None else min(params.max_tokens, left),
            seed=params.seed if params.seed is not None else self._next_seed(),
            matcher=params.grammar.matcher() if params.grammar else None,
            adapter=adapter,
        )

    def set_kv_budget(self, num_bytes: int) -> None:
        """How much KV may take from now on. With less, prompts that come later may have to be shorter."""
        self._inbox.put(SetKVBudget(num_bytes))

    async def stop(self) -> None:
        await super().stop()
        self._rendering.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()

    def _check_prompt(self, prompt_token_ids: list[int], param: str) -> None:
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param=param)
        self._check_token_ids(param, prompt_token_ids)
        if len(prompt_token_ids) >= self.max_model_len:
            size = f"{len(prompt_token_ids)} tokens"
            raise PromptTooLong.of_size(size, self.max_model_len, param=param)

    def _check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"token ids must be between 0 and {self._tokenizer.vocab_size - 1}", param=param
            )

    def _next_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(63)
        self._num_seeds_given += 1
        return self._seed + self._num_seeds_given - 1

    def _close_stream(self, request_id: str) -> None:
        if self._release(request_id) is not None:
            self._inbox.put(AbortRequest(request_id))

    def _deliver(self, outputs: Sequence[RequestOutput], stats: EngineStats) -> None:
        self.stats = stats
        for output in outputs:
            if output.finished:
                stream = self._release(output.request_id)
            else:
                stream = self._held.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def _set_max_model_len(self, num_tokens: int, stats: EngineStats) -> None:
        self.max_model_len, self.stats = num_tokens, stats

    def _end_all(self, failure: str | None) -> None:
        reason = FinishReason.ABORT if failure is None else FinishReason.ERROR
        for request_id in list(self._held):
            if stream := self._release(request_id):
                stream.put(RequestOutput(request_id, finish_reason=reason, error=failure))

    # From here on: the engine thread.

    def _step(self, core: EngineCore) -> list[RequestOutput]:
        return core.step() + self._progress(core)

    def _progress(self, core: EngineCore) -> list[RequestOutput]:
        outputs = core.progress(self._reporting)
        self._reporting = {output.request_id for output in outputs}
        return outputs

    def _apply(self, core: EngineCore, message: object) -> None:
        match message:
            case AddRequest(request, reports_progress):
                self._add(core, request)
                if reports_progress:
                    self._reporting.add(request.request_id)
            case AbortRequest(request_id):
                core.abort_request(request_id)
            case SetKVBudget(num_bytes):
                core.set_kv_budget(num_bytes)
                num_tokens = core.scheduler.kv.max_num_tokens(self._most_model_len, num_bytes)
                self._call(self._set_max_model_len, num_tokens, core.stats())

    def _add(self, core: EngineCore, request: Request) -> None:
        try:
            core.add_request(request)
        except Exception as exc:
            logger.exception("request %s could not be added", request.request_id)
            output = RequestOutput(
                request.request_id, finish_reason=FinishReason.ERROR, error=f"{type(exc).__name__}: {exc}"
            )
            self._call(self._deliver, [output], core.stats())
