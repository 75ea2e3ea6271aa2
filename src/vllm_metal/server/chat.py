"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

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
from vllm_metal.errors import MetalError
from vllm_metal.parsing.answer import Answer
from vllm_metal.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_metal.server import bodies, chat_answers, logprobs
from vllm_metal.server.answer_reader import AnswerReader
from vllm_metal.server.chat_answers import ChatAnswers
from vllm_metal.server.request_id import request_id
from vllm_metal.server.sse import openai_failure
from vllm_metal.server.thought_counter import ThoughtCounter


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, ChatCompletionRequest)
    return await chat_answers.respond(
        request, body, partial(ChatWording, f"chatcmpl-{request_id(request)}", body)
    )


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


@dataclass(slots=True)
class ChatWording:
    named_events: ClassVar[bool] = False

    id: str
    body: ChatCompletionRequest
    answers: ChatAnswers
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[ChatChoiceWording] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [ChatChoiceWording(reader) for reader in self.answers.readers]

    @property
    def thoughts(self) -> list[ThoughtCounter]:
        return self.answers.thoughts

    def read(self, index: int, output: RequestOutput) -> bool:
        self.choices[index].read(output)
        return self.choices[index].reader.enough

    def opening(self) -> list[ChatCompletionChunk]:
        beginning = Delta(role="assistant", content="")
        chunks = [self._chunk(ChatChunkChoice(beginning, index=index)) for index in range(self.body.n)]
        if self.body.return_token_ids:
            chunks[0].prompt_token_ids = self.answers.prompt
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
    ) -> list[ChatCompletionChunk]:
        reason = self.choices[index].reader.finish_reason(finish_reason)
        return [self._chunk(ChatChunkChoice(Delta(), reason, index), usage)]

    def ending(self, usage: Usage) -> list[ChatCompletionChunk]:
        if not self.body.stream_options.include_usage:
            return []
        return [ChatCompletionChunk(self.id, self.created, self.answers.model, [], usage)]

    def failure(self, exc: MetalError) -> Sequence[Struct]:
        return openai_failure(exc)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        whole = ChatCompletion(self.id, self.created, self.answers.model, choices, usage)
        if self.body.prompt_logprobs is not None:
            told = outputs[0].prompt_logprobs
            whole.prompt_logprobs = logprobs.of_prompt(told, self.answers.names, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            whole.prompt_token_ids = self.answers.prompt
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
        return logprobs.of_chat(output.logprobs, self.answers.names) if output.logprobs else None

    def _token_ids(self, output: RequestOutput) -> list[int] | UnsetType:
        return list(output.token_ids) if self.body.return_token_ids else UNSET

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | UnsetType = UNSET) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.answers.model, [choice], usage)
