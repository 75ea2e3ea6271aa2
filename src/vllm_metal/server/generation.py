"""The one path from a request's outputs to its reply, whole or streamed, of any endpoint that generates."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Protocol

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from vllm_metal.api.generation import GenerationRequest, StreamOptions
from vllm_metal.api.usage import PromptTokensDetails, Usage
from vllm_metal.engine.async_engine import AsyncEngine, RequestStream
from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import EngineError, EngineUnavailable
from vllm_metal.server import bodies
from vllm_metal.server.keys import CONFIG, USAGE
from vllm_metal.server.sse import EventStream


class Wording(Protocol):
    """How an endpoint puts an answer: as chunks (opening, deltas, closing, usage) or as a whole."""

    def opening(self) -> Sequence[Struct]: ...
    def delta(self, output: RequestOutput, usage: Usage | UnsetType) -> Struct: ...
    def closing(self, finish_reason: str, usage: Usage | UnsetType) -> Struct: ...
    def usage(self, usage: Usage) -> Struct: ...
    def whole(self, output: RequestOutput, usage: Usage) -> Struct: ...


def deadline(request: web.Request, body: GenerationRequest) -> float | None:
    """When the request is given up, in the loop's time."""
    timeout_s = body.timeout or request.app[CONFIG].server.request_timeout
    return asyncio.get_running_loop().time() + timeout_s if timeout_s else None


def engine_id(reply_id: str) -> str:
    """Unlike the reply's, which follows the client's own, an id that no other request has."""
    return f"{reply_id}-{secrets.token_hex(4)}"


async def sampling_params(engine: AsyncEngine, body: GenerationRequest) -> SamplingParams:
    """What the request asks for, else what the model's makers advise. Raises InvalidRequest."""
    asked = body.sampling()
    if body.bad_words:
        asked["bad_words"] = await engine.encode_words(body.bad_words)
    return SamplingParams(**{**engine.sampling_defaults, **asked})


async def respond(
    request: web.Request, outputs: RequestStream, wording: Wording, body: GenerationRequest
) -> web.StreamResponse:
    """Leaving early, by an error or because the client has gone, aborts the request."""
    async with outputs:
        if body.stream:
            return await _streamed(request, outputs, wording, body.stream_options)
        return await _whole(request, outputs, wording)


async def _streamed(
    request: web.Request, outputs: RequestStream, wording: Wording, options: StreamOptions
) -> web.StreamResponse:
    async with EventStream(request) as events:
        await events.send(*wording.opening())
        async for output in outputs:
            usage = _usage(request, output)
            running_usage = usage if options.continuous_usage_stats else UNSET
            chunks = []
            if output.text or output.logprobs:
                chunks.append(wording.delta(output, running_usage))
            if output.finish_reason:
                chunks.append(wording.closing(output.finish_reason, running_usage))
                if options.include_usage:
                    chunks.append(wording.usage(usage))
            await events.send(*chunks)
    return events.response


async def _whole(request: web.Request, outputs: RequestStream, wording: Wording) -> web.Response:
    whole = RequestOutput(outputs.request_id)
    async for output in outputs:
        usage = _usage(request, output)
        whole.merge(output)
    return bodies.reply(wording.whole(whole, usage))


def _usage(request: web.Request, output: RequestOutput) -> Usage:
    """Raises the error that `output` stands for."""
    if output.finish_reason is FinishReason.ERROR:
        raise EngineError(output.error or "the engine failed")
    if output.finish_reason is FinishReason.ABORT:
        raise EngineUnavailable("the server is shutting down")
    usage = request[USAGE] = Usage(
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=output.num_output_tokens,
        total_tokens=output.num_prompt_tokens + output.num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(output.num_cached_tokens),
    )
    return usage
