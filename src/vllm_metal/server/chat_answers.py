"""The way to an answer to a chat, whichever API has asked for it: each translates its own body first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vllm_metal.api import keep_alive
from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest
from vllm_metal.server import answer_structure, generation
from vllm_metal.server.answer_reader import AnswerReader
from vllm_metal.server.generation import Wording
from vllm_metal.server.keys import CONFIG, MANAGER
from vllm_metal.server.logprobs import TokenNames
from vllm_metal.server.reading import Reading
from vllm_metal.server.request_id import request_id
from vllm_metal.server.thought_counter import ThoughtCounter


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """What puts the answers into words: which model gives them, its prompt, how it samples, the names of its
    tokens, and a reader for each choice.
    """

    model: str
    prompt: list[int]
    params: SamplingParams
    names: TokenNames
    readers: list[AnswerReader]
    thoughts: list[ThoughtCounter]


async def respond(
    request: web.Request, body: ChatCompletionRequest, new_wording: Callable[[ChatAnswers], Wording]
) -> web.StreamResponse:
    """Raises InvalidRequest, and as `ModelManager.acquire` and `AsyncEngine.add_requests` do."""
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    messages, template_kwargs = template_inputs(request, body)
    manager = request.app[MANAGER]
    deadline = generation.deadline(request, body)
    keep_alive_s = keep_alive.seconds(body.keep_alive)
    async with manager.acquire(body.model, deadline=deadline, keep_alive_s=keep_alive_s) as engine:
        engine.check_room(body.n)
        prompt = await engine.encode_chat(
            messages, only_end=body.truncate_prompt_tokens is not None, **template_kwargs
        )
        prompt = generation.truncated(prompt, body, engine)
        reading = await Reading.of(engine, body, prompt)
        params = await generation.sampling_params(
            engine, body, await answer_structure.grammar(reading, engine)
        )
        answers = ChatAnswers(
            engine.answers_as(body.model),
            prompt,
            params,
            TokenNames(engine.token_bytes, by_id=body.return_tokens_as_token_ids),
            [reading.new_reader(params) for _ in range(body.n)],
            [counter for _ in range(body.n) if (counter := reading.new_thought_counter(engine))],
        )
        params = reading.adapted(params, engine)
        choices = generation.choices(request_id(request), [prompt], params, body.n, "messages")
        outputs = generation.begin(engine, choices, body, deadline)
        return await generation.respond(request, outputs, new_wording(answers), body)


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
