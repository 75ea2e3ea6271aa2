"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import Struct, UnsetType

from vllm_metal.api.openai import Completion, CompletionRequest, TextChoice, Usage
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.server import bodies, generation
from vllm_metal.server.keys import MANAGER


async def completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, CompletionRequest)
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    prompt = body.single_prompt()
    manager = request.app[MANAGER]
    async with manager.acquire(body.model) as engine:
        params = SamplingParams(**{**engine.sampling_defaults, **body.sampling()})
        prompt_token_ids = await engine.encode(prompt) if isinstance(prompt, str) else prompt
        wording = CompletionWording(model=manager.served_names[0])
        outputs = engine.add_request(wording.id, prompt_token_ids, params)
        return await generation.respond(request, outputs, wording, body)


@dataclass(frozen=True, slots=True)
class CompletionWording:
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[Struct]:
        return []

    def delta(self, text: str, usage: Usage | UnsetType) -> Completion:
        return self._completion([TextChoice(text)], usage)

    def closing(self, finish_reason: str, usage: Usage | UnsetType) -> Completion:
        return self._completion([TextChoice("", finish_reason)], usage)

    def usage(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Completion:
        return self._completion([TextChoice(text, finish_reason)], usage)

    def _completion(self, choices: list[TextChoice], usage: Usage | UnsetType) -> Completion:
        return Completion(self.id, self.created, self.model, choices, usage)
