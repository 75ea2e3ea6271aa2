"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import UNSET, UnsetType

from vllm_metal.api.openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Delta,
    Usage,
)
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.server import bodies, generation
from vllm_metal.server.keys import MANAGER


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, ChatCompletionRequest)
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    messages, template_kwargs = body.template_messages(), body.template_kwargs()
    manager = request.app[MANAGER]
    async with manager.acquire(body.model) as engine:
        params = SamplingParams(**{**engine.sampling_defaults, **body.sampling()})
        prompt_token_ids = await engine.encode_chat(messages, **template_kwargs)
        wording = ChatWording(model=manager.served_names[0])
        outputs = engine.add_request(wording.id, prompt_token_ids, params, prompt_param="messages")
        return await generation.respond(request, outputs, wording, body)


@dataclass(frozen=True, slots=True)
class ChatWording:
    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[ChatCompletionChunk]:
        return [self._chunk(Delta(role="assistant", content=""))]

    def delta(self, text: str, usage: Usage | UnsetType) -> ChatCompletionChunk:
        return self._chunk(Delta(content=text), usage=usage)

    def closing(self, finish_reason: str, usage: Usage | UnsetType) -> ChatCompletionChunk:
        return self._chunk(Delta(), finish_reason, usage)

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, [], usage)

    def whole(self, text: str, finish_reason: str, usage: Usage) -> ChatCompletion:
        choice = ChatChoice(AssistantMessage(text), finish_reason)
        return ChatCompletion(self.id, self.created, self.model, [choice], usage)

    def _chunk(
        self, delta: Delta, finish_reason: str | None = None, usage: Usage | UnsetType = UNSET
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(delta, finish_reason)
        return ChatCompletionChunk(self.id, self.created, self.model, [choice], usage)
