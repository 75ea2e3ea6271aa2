"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from aiohttp import web
from msgspec import Struct, UnsetType

from vllm_metal.api import keep_alive
from vllm_metal.api.completions import Completion, CompletionRequest, TextChoice, TextLogprobs
from vllm_metal.api.usage import Usage
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest, MetalError
from vllm_metal.server import bodies, generation
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.logprobs import TextLogprobsWriter, TokenNames, of_prompt
from vllm_metal.server.request_id import request_id
from vllm_metal.server.sse import openai_failure
from vllm_metal.server.thought_counter import ThoughtCounter


async def completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, CompletionRequest)
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    prompts = body.prompts()
    manager = request.app[MANAGER]
    deadline = generation.deadline(request, body)
    keep_alive_s = keep_alive.seconds(body.keep_alive)
    async with manager.acquire(body.model, deadline=deadline, keep_alive_s=keep_alive_s) as engine:
        engine.check_room(len(prompts) * body.n)
        params = await generation.sampling_params(engine, body, body.grammar())
        encoded = [await _encoded(engine, prompt, body) for prompt in prompts]
        echoes = [await _echo(engine, *each, body) for each in zip(prompts, encoded, strict=True)]
        names = TokenNames(engine.token_bytes, by_id=body.return_tokens_as_token_ids)
        choices = [
            ChoiceWording(index, body, names, encoded[index // body.n], echoes[index // body.n])
            for index in range(len(prompts) * body.n)
        ]
        reply_id, model = f"cmpl-{request_id(request)}", engine.answers_as(body.model)
        wording = CompletionWording(reply_id, model, body, choices)
        requests = generation.choices(wording.id, encoded, params, body.n, "prompt")
        outputs = generation.begin(engine, requests, body, deadline)
        return await generation.respond(request, outputs, wording, body)


async def _encoded(engine: AsyncEngine, prompt: str | list[int], body: CompletionRequest) -> list[int]:
    if body.suffix:
        if not isinstance(prompt, str):
            raise InvalidRequest("`suffix` needs a prompt that is text", param="suffix")
        return await engine.encode_around(prompt, body.suffix)
    if isinstance(prompt, str):
        only_end = body.truncate_prompt_tokens is not None
        prompt = await engine.encode(prompt, add_special_tokens=body.add_special_tokens, only_end=only_end)
    return generation.truncated(prompt, body, engine)


async def _echo(
    engine: AsyncEngine, prompt: str | list[int], token_ids: list[int], body: CompletionRequest
) -> str:
    """The text of a prompt, as its client wrote it if they did."""
    if not body.echo:
        return ""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    skip_special_tokens = body.skip_special_tokens is not False
    return await engine.decode(token_ids, skip_special_tokens=skip_special_tokens)


class ChoiceWording:
    """Puts one choice, piece by piece; `echo` is what comes before the answer."""

    def __init__(
        self, index: int, body: CompletionRequest, names: TokenNames, prompt: list[int], echo: str
    ) -> None:
        self._index = index
        self._body = body
        self._names = names
        self._prompt = prompt
        self._echo = echo
        self._logprobs = TextLogprobsWriter(names, skip_special_tokens=body.skip_special_tokens is not False)
        self._begun = False

    def piece(self, output: RequestOutput, finish_reason: str | None = None) -> TextChoice:
        choice = TextChoice(output.text, finish_reason, self._index)
        if not self._begun:
            self._begun = True
            self._begin(choice, output)
        if output.logprobs:
            choice.logprobs = _joined(choice.logprobs, self._logprobs.write(output.logprobs))
        if self._body.return_token_ids:
            choice.token_ids = list(output.token_ids)
        return choice

    def _begin(self, choice: TextChoice, output: RequestOutput) -> None:
        body = self._body
        if body.echo:
            choice.text = self._echo + choice.text
            if body.logprobs is not None:
                told = output.prompt_logprobs
                choice.logprobs = self._logprobs.write_prompt(self._prompt, told, body.logprobs, self._echo)
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = of_prompt(output.prompt_logprobs, self._names, body.prompt_logprobs)
        if body.return_token_ids:
            choice.prompt_token_ids = self._prompt


def _joined(first: TextLogprobs | None, second: TextLogprobs) -> TextLogprobs:
    if first is None:
        return second
    return TextLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


@dataclass(frozen=True, slots=True)
class CompletionWording:
    named_events: ClassVar[bool] = False

    id: str
    model: str
    body: CompletionRequest
    choices: list[ChoiceWording]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def thoughts(self) -> list[ThoughtCounter]:
        return []

    def read(self, index: int, output: RequestOutput) -> bool:
        return False

    def opening(self) -> list[Struct]:
        return []

    def deltas(self, index: int, output: RequestOutput, usage: Usage | UnsetType) -> list[Completion]:
        choice = self.choices[index].piece(output)
        if not (choice.text or choice.logprobs or choice.token_ids):
            return []
        return [self._completion([choice], usage)]

    def closing(self, index: int, finish_reason: FinishReason, usage: Usage | UnsetType) -> list[Completion]:
        return [self._completion([TextChoice("", finish_reason, index)], usage)]

    def ending(self, usage: Usage) -> list[Completion]:
        return [self._completion([], usage)] if self.body.stream_options.include_usage else []

    def failure(self, exc: MetalError) -> Sequence[Struct]:
        return openai_failure(exc)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
        choices = [
            choice.piece(output, output.finish_reason)
            for choice, output in zip(self.choices, outputs, strict=True)
        ]
        return self._completion(choices, usage)

    def _completion(self, choices: list[TextChoice], usage: Usage | UnsetType) -> Completion:
        return Completion(self.id, self.created, self.model, choices, usage)
