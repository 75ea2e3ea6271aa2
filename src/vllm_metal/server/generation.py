"""The one path from a request's outputs to its reply, whole or streamed, of any endpoint that generates."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from vllm_metal.api.embeddings import PoolingRequest
from vllm_metal.api.generation import GenerationRequest, Progress
from vllm_metal.api.usage import Usage
from vllm_metal.engine.async_engine import AsyncEngine, NewRequest, RequestStream
from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.engine.outputs import Progress as EngineProgress
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest, MetalError
from vllm_metal.server import bodies
from vllm_metal.server.keys import CONFIG, DEADLINE, TALLY
from vllm_metal.server.sse import EventStream
from vllm_metal.server.tally import Tally
from vllm_metal.server.thought_counter import ThoughtCounter
from vllm_metal.structure.grammar import Grammar


class Wording(Protocol):
    """How an endpoint puts an answer: as events (opening, deltas, closing for each choice, ending or failure)
    or as a whole.

    It reads each output of a choice before it puts that, and says whether the answer has all it wants.
    `thoughts` are as for `Tally`, `named_events` as for `EventStream`.
    """

    @property
    def named_events(self) -> bool: ...
    @property
    def thoughts(self) -> Sequence[ThoughtCounter]: ...
    def read(self, index: int, output: RequestOutput) -> bool: ...
    def opening(self) -> Sequence[Struct]: ...
    def deltas(self, index: int, output: RequestOutput, usage: Usage | UnsetType) -> Sequence[Struct]: ...
    def closing(
        self, index: int, finish_reason: FinishReason, usage: Usage | UnsetType
    ) -> Sequence[Struct]: ...
    def ending(self, usage: Usage) -> Sequence[Struct]: ...
    def failure(self, exc: MetalError) -> Sequence[Struct]: ...
    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Struct: ...


def deadline(request: web.Request, body: GenerationRequest | PoolingRequest) -> float | None:
    """When the request is given up, in the loop's time: the same however often it is asked for."""
    timeout_s = body.timeout or request.app[CONFIG].server.request_timeout
    if not timeout_s:
        return None
    deadline: float = request.setdefault(DEADLINE, asyncio.get_running_loop().time() + timeout_s)
    return deadline


async def sampling_params(
    engine: AsyncEngine, body: GenerationRequest, grammar: Grammar | None
) -> SamplingParams:
    """What the request asks for, else what the model's makers advise. Raises InvalidRequest."""
    asked = body.sampling()
    if body.bad_words:
        asked["bad_words"] = await engine.encode_words(body.bad_words)
    if grammar is not None:
        asked["grammar"] = await engine.compile(grammar)
    return SamplingParams(**{**engine.sampling_defaults, **asked})


def choices(
    reply_id: str, prompts: Sequence[list[int]], params: SamplingParams, n: int, param: str
) -> list[NewRequest]:
    """`n` answers to each of `prompts`, which the client calls `param`, in the order of their indices."""
    # Unlike the reply's id, which follows the client's own, one that no other request has.
    engine_id = f"{reply_id}-{secrets.token_hex(4)}"
    return [
        NewRequest(
            f"{engine_id}-{i * n + j}",
            prompt,
            params if params.seed is None else replace(params, seed=_seed(params.seed, j)),
            prompt_param=param if len(prompts) == 1 else f"{param}[{i}]",
        )
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]


def _seed(seed: int, choice: int) -> int:
    """The first choice is that of a request for one; the others draw as if each had a seed of its own."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest())


def truncated(token_ids: list[int], body: GenerationRequest, engine: AsyncEngine) -> list[int]:
    """The end of a prompt, as much as the request wants. Raises InvalidRequest for more than is served."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return token_ids
    if wanted > engine.max_model_len:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` must be at most {engine.max_model_len}, what this model serves",
            param="truncate_prompt_tokens",
        )
    if wanted == -1:
        max_tokens = body.sampling().get("max_tokens") or 1
        wanted = engine.max_model_len - (max_tokens if max_tokens < engine.max_model_len else 1)
    return token_ids[-wanted:]


def begin(
    engine: AsyncEngine, requests: Sequence[NewRequest], body: GenerationRequest, deadline: float | None
) -> RequestStream:
    """Raises as `AsyncEngine.add_requests` does."""
    reports_progress = body.stream and bool(body.stream_options.include_progress)
    return engine.add_requests(
        requests, model=body.model, deadline=deadline, reports_progress=reports_progress
    )


async def respond(
    request: web.Request, outputs: RequestStream, wording: Wording, body: GenerationRequest
) -> web.StreamResponse:
    """Leaving early, by an error of one choice or because the client has gone, aborts them all."""
    async with outputs:
        reply = _streamed if body.stream else _whole
        return await reply(request, outputs, wording, body)


async def _streamed(
    request: web.Request, outputs: RequestStream, wording: Wording, body: GenerationRequest
) -> web.StreamResponse:
    options = body.stream_options
    tally = request[TALLY] = Tally(outputs.requests, body.n, wording.thoughts)
    told: dict[int, Progress] = {}
    async with EventStream(request, failure=wording.failure, named=wording.named_events) as events:
        await events.send(*wording.opening())
        async for news in outputs:
            chunks: list[Struct] = []
            for output in news:
                index = tally.count(output)
                if output.progress is not None:
                    progress = _progress(index, output.progress, output.num_prompt_tokens)
                    if told.get(index) != progress:
                        told[index] = progress
                        await events.comment(f"progress {msgspec.json.encode(progress).decode()}")
                    continue
                _read(index, output, wording, outputs)
                usage = tally.usage if options.continuous_usage_stats else UNSET
                chunks += wording.deltas(index, output, usage)
                if output.finish_reason:
                    chunks += wording.closing(index, output.finish_reason, usage)
            if outputs.ended:
                chunks += wording.ending(tally.usage)
            await events.send(*chunks)
    return events.response


def _read(index: int, output: RequestOutput, wording: Wording, outputs: RequestStream) -> None:
    """What has all it wants ends here, though the model may go on."""
    if wording.read(index, output):
        output.finish_reason = FinishReason.STOP
        outputs.end(output.request_id)


def _progress(index: int, progress: EngineProgress, num_prompt_tokens: int) -> Progress:
    return Progress(index, progress.queue_place, progress.num_computed_tokens, num_prompt_tokens)


async def _whole(
    request: web.Request, outputs: RequestStream, wording: Wording, body: GenerationRequest
) -> web.Response:
    tally = request[TALLY] = Tally(outputs.requests, body.n, wording.thoughts)
    wholes = [RequestOutput(each.request_id) for each in outputs.requests]
    async for news in outputs:
        for output in news:
            index = tally.count(output)
            _read(index, output, wording, outputs)
            wholes[index].merge(output)
    return bodies.reply(wording.whole(wholes, tally.usage))
