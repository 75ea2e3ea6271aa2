"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import Struct, UnsetType

from vllm_metal.api.completions import Completion, CompletionRequest, TextChoice
from vllm_metal.api.usage import Usage
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.engine.outputs import RequestOutput
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest
from vllm_metal.server import bodies, generation
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.logprobs import TextLogprobsWriter
from vllm_metal.server.request_id import request_id


async def completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, CompletionRequest)
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    prompt = body.single_prompt()
    manager = request.app[MANAGER]
    deadline = generation.deadline(request, body)
    async with manager.acquire(body.model, deadline=deadline) as engine:
        params = await generation.sampling_params(engine, body)
        prompt_token_ids = await _encoded(engine, prompt, body)
        wording = CompletionWording(
            f"cmpl-{request_id(request)}", manager.served_names[0], TextLogprobsWriter(engine.token_bytes)
        )
        outputs = engine.add_request(
            generation.engine_id(wording.id), prompt_token_ids, params, deadline=deadline
        )
        return await generation.respond(request, outputs, wording, body)


async def _encoded(engine: AsyncEngine, prompt: str | list[int], body: CompletionRequest) -> list[int]:
    if not isinstance(prompt, str):
        if body.suffix:
            raise InvalidRequest("`suffix` needs a prompt that is text", param="suffix")
        return prompt
    if body.suffix:
        return await engine.encode_around(prompt, body.suffix)
    return await engine.encode(prompt, add_special_tokens=body.add_special_tokens)


@dataclass(frozen=True, slots=True)
class CompletionWording:
    id: str
    model: str
    logprobs: TextLogprobsWriter
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[Struct]:
        return []

    def delta(self, output: RequestOutput, usage: Usage | UnsetType) -> Completion:
        return self._completion([self._choice(output)], usage)

    def closing(self, finish_reason: str, usage: Usage | UnsetType) -> Completion:
        return self._completion([TextChoice("", finish_reason)], usage)

    def usage(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def whole(self, output: RequestOutput, usage: Usage) -> Completion:
        return self._completion([self._choice(output, output.finish_reason)], usage)

    def _choice(self, output: RequestOutput, finish_reason: str | None = None) -> TextChoice:
        logprobs = self.logprobs.write(output.logprobs) if output.logprobs else None
        return TextChoice(output.text, finish_reason, logprobs=logprobs)

    def _completion(self, choices: list[TextChoice], usage: Usage | UnsetType) -> Completion:
        return Completion(self.id, self.created, self.model, choices, usage)
