"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from vllm_metal.api.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    Delta,
)
from vllm_metal.api.usage import Usage
from vllm_metal.engine.async_engine import TokenBytes
from vllm_metal.engine.outputs import RequestOutput
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest
from vllm_metal.server import bodies, generation, logprobs
from vllm_metal.server.keys import CONFIG, MANAGER
from vllm_metal.server.request_id import request_id


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, ChatCompletionRequest)
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    messages, template_kwargs = template_inputs(request, body)
    manager = request.app[MANAGER]
    deadline = generation.deadline(request, body)
    async with manager.acquire(body.model, deadline=deadline) as engine:
        params = await generation.sampling_params(engine, body)
        prompt_token_ids = await engine.encode_chat(messages, **template_kwargs)
        wording = ChatWording(f"chatcmpl-{request_id(request)}", manager.served_names[0], engine.token_bytes)
        outputs = engine.add_request(
            generation.engine_id(wording.id),
            prompt_token_ids,
            params,
            prompt_param="messages",
            deadline=deadline,
        )
        return await generation.respond(request, outputs, wording, body)


def template_inputs(
    request: web.Request, body: ChatCompletionRequest
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, and what else `AsyncEngine.encode_chat` is to know. Raises InvalidRequest."""
    if body.chat_template is not None and not request.app[CONFIG].server.trust_request_chat_template:
        raise InvalidRequest(
            "a chat template in the request is not trusted here",
            param="chat_template",
            hint="`server.trust_request_chat_template` lets requests bring their own",
        )
    return body.template_messages(), body.template_kwargs()


@dataclass(frozen=True, slots=True)
class ChatWording:
    id: str
    model: str
    token_bytes: TokenBytes
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[ChatCompletionChunk]:
        return [self._chunk(ChatChunkChoice(Delta(role="assistant", content="")))]

    def delta(self, output: RequestOutput, usage: Usage | UnsetType) -> ChatCompletionChunk:
        choice = ChatChunkChoice(Delta(content=output.text), logprobs=self._logprobs(output))
        return self._chunk(choice, usage)

    def closing(self, finish_reason: str, usage: Usage | UnsetType) -> ChatCompletionChunk:
        return self._chunk(ChatChunkChoice(Delta(), finish_reason), usage)

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, [], usage)

    def whole(self, output: RequestOutput, usage: Usage) -> ChatCompletion:
        assert output.finish_reason is not None
        message = AssistantMessage(output.text)
        choice = ChatChoice(message, output.finish_reason, logprobs=self._logprobs(output))
        return ChatCompletion(self.id, self.created, self.model, [choice], usage)

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        return logprobs.of_chat(output.logprobs, self.token_bytes) if output.logprobs else None

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | UnsetType = UNSET) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, [choice], usage)
