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
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from vllm_metal.api.usage import Usage
from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest
from vllm_metal.parsing.answer import Answer
from vllm_metal.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_metal.server import answer_structure, bodies, generation, logprobs
from vllm_metal.server.answer_reader import AnswerReader
from vllm_metal.server.keys import CONFIG, MANAGER
from vllm_metal.server.logprobs import TokenNames
from vllm_metal.server.reading import Reading
from vllm_metal.server.request_id import request_id
from vllm_metal.server.thought_counter import ThoughtCounter


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, ChatCompletionRequest)
    SamplingParams(**body.sampling())  # What is wrong is refused before the model is awaited.
    messages, template_kwargs = template_inputs(request, body)
    manager = request.app[MANAGER]
    deadline = generation.deadline(request, body)
    async with manager.acquire(body.model, deadline=deadline) as engine:
        engine.check_room(body.n)
        prompt = await engine.encode_chat(
            messages, only_end=body.truncate_prompt_tokens is not None, **template_kwargs
        )
        prompt = generation.truncated(prompt, body, engine)
        reading = await Reading.of(engine, body, prompt)
        params = await generation.sampling_params(
            engine, body, await answer_structure.grammar(reading, engine)
        )
        wording = ChatWording(
            f"chatcmpl-{request_id(request)}",
            manager.served_names[0],
            body,
            prompt,
            TokenNames(engine.token_bytes, by_id=body.return_tokens_as_token_ids),
            [ChatChoiceWording(reading.new_reader(params)) for _ in range(body.n)],
            [counter for _ in range(body.n) if (counter := reading.new_thought_counter(engine))],
        )
        params = reading.adapted(params, engine)
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


class ChatChoiceWording:
    """Puts one choice: what is read of it and not yet put, as deltas or as a message."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self._events: list[Event] = []

    def read(self, output: RequestOutput) -> None:
        self._events += self.reader.read(output)

    def deltas(self) -> list[Delta]:
        events, self._events = self._events, []
        return [delta for event in events if (delta := _delta(event)) is not None]

    def message(self) -> AssistantMessage:
        answer = Answer.of(self._events)
        message = AssistantMessage(answer.content)
        if answer.reasoning:
            message.reasoning = message.reasoning_content = answer.reasoning
        if answer.tool_calls:
            message.content = answer.content or None
            message.tool_calls = [
                ToolCall(FunctionCall(call.name, call.arguments), call.id) for call in answer.tool_calls
            ]
        return message


def _delta(event: Event) -> Delta | None:
    match event:
        case ContentDelta(text):
            return Delta(content=text)
        case ReasoningDelta(text):
            return Delta(reasoning=text, reasoning_content=text)
        case ToolCallStart(index, id, name):
            return Delta(tool_calls=[ToolCallDelta(index, FunctionCallDelta("", name), id, "function")])
        case ToolCallArguments(index, text):
            return Delta(tool_calls=[ToolCallDelta(index, FunctionCallDelta(text))])
        case ToolCallEnd():
            return None


@dataclass(frozen=True, slots=True)
class ChatWording:
    id: str
    model: str
    body: ChatCompletionRequest
    prompt: list[int]
    names: TokenNames
    choices: list[ChatChoiceWording]
    thoughts: list[ThoughtCounter]
    created: int = field(default_factory=lambda: int(time.time()))

    def read(self, index: int, output: RequestOutput) -> bool:
        self.choices[index].read(output)
        return self.choices[index].reader.enough

    def opening(self) -> list[ChatCompletionChunk]:
        beginning = Delta(role="assistant", content="")
        chunks = [self._chunk(ChatChunkChoice(beginning, index=index)) for index in range(self.body.n)]
        if self.body.return_token_ids:
            chunks[0].prompt_token_ids = self.prompt
        return chunks

    def deltas(
        self, index: int, output: RequestOutput, usage: Usage | UnsetType
    ) -> list[ChatCompletionChunk]:
        token_ids = self._token_ids(output)
        choices = [ChatChunkChoice(delta, index=index) for delta in self.choices[index].deltas()]
        if output.logprobs or token_ids:
            # They go with the tokens, of which some add nothing yet.
            choices = choices or [ChatChunkChoice(Delta(content=""), index=index)]
            choices[0].logprobs, choices[0].token_ids = self._logprobs(output), token_ids
        return [self._chunk(choice, usage) for choice in choices]

    def closing(
        self, index: int, finish_reason: FinishReason, usage: Usage | UnsetType
    ) -> ChatCompletionChunk:
        reason = self.choices[index].reader.finish_reason(finish_reason)
        return self._chunk(ChatChunkChoice(Delta(), reason, index), usage)

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
        wording = self.choices[index]
        return ChatChoice(
            wording.message(),
            wording.reader.finish_reason(output.finish_reason),
            index,
            self._logprobs(output),
            self._token_ids(output),
        )

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        return logprobs.of_chat(output.logprobs, self.names) if output.logprobs else None

    def _token_ids(self, output: RequestOutput) -> list[int] | UnsetType:
        return list(output.token_ids) if self.body.return_token_ids else UNSET

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | UnsetType = UNSET) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, [choice], usage)
