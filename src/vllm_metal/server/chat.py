"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from vllm_metal.engine.outputs import RequestOutput
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest
from vllm_metal.server import bodies, generation, logprobs
from vllm_metal.server.keys import CONFIG, MANAGER
from vllm_metal.server.logprobs import TokenNames
from vllm_metal.server.request_id import request_id


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, ChatCompletionRequest)
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    messages, template_kwargs = template_inputs(request, body)
    manager = request.app[MANAGER]
    deadline = generation.deadline(request, body)
    async with manager.acquire(body.model, deadline=deadline) as engine:
        engine.check_room(body.n)
        params = await generation.sampling_params(engine, body)
        prompt = await engine.encode_chat(
            messages, any_length=body.truncate_prompt_tokens is not None, **template_kwargs
        )
        prompt = generation.truncated(prompt, body, engine)
        wording = ChatWording(
            f"chatcmpl-{request_id(request)}",
            manager.served_names[0],
            body,
            prompt,
            TokenNames(engine.token_bytes, by_id=body.return_tokens_as_token_ids),
        )
        choices = generation.choices(wording.id, [prompt], params, body.n, "messages")
        outputs = generation.begin(engine, choices, body, deadline)
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
    body: ChatCompletionRequest
    prompt: list[int]
    names: TokenNames
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[ChatCompletionChunk]:
        beginning = Delta(role="assistant", content="")
        chunks = [self._chunk(ChatChunkChoice(beginning, index=index)) for index in range(self.body.n)]
        if self.body.return_token_ids:
            chunks[0].prompt_token_ids = self.prompt
        return chunks

    def delta(
        self, index: int, output: RequestOutput, usage: Usage | UnsetType
    ) -> ChatCompletionChunk | None:
        token_ids = self._token_ids(output)
        if not (output.text or output.logprobs or token_ids):
            return None
        delta = Delta(content=output.text)
        choice = ChatChunkChoice(delta, None, index, self._logprobs(output), token_ids)
        return self._chunk(choice, usage)

    def closing(self, index: int, finish_reason: str, usage: Usage | UnsetType) -> ChatCompletionChunk:
        return self._chunk(ChatChunkChoice(Delta(), finish_reason, index), usage)

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, [], usage)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        whole = ChatCompletion(self.id, self.created, self.model, choices, usage)
        if self.body.prompt_logprobs is not None:
            told = outputs[0].prompt_logprobs
            whole.prompt_logprobs = logprobs.of_prompt(told, self.names, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            whole.prompt_token_ids = self.prompt
        return whole

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        assert output.finish_reason is not None
        message = AssistantMessage(output.text)
        return ChatChoice(
            message, output.finish_reason, index, self._logprobs(output), self._token_ids(output)
        )

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        return logprobs.of_chat(output.logprobs, self.names) if output.logprobs else None

    def _token_ids(self, output: RequestOutput) -> list[int] | UnsetType:
        return list(output.token_ids) if self.body.return_token_ids else UNSET

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | UnsetType = UNSET) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, [choice], usage)
