"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

from aiohttp import web
from msgspec import UNSET, UnsetType

from vllm_metal.api import message_errors, messages_as_chats
from vllm_metal.api.message_errors import MessageError
from vllm_metal.api.message_replies import (
    Message,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopReason,
)
from vllm_metal.api.messages import CountTokensRequest, MessagesRequest, TokenCount
from vllm_metal.api.messages_as_chats import OWN_NAMES
from vllm_metal.api.own_names import in_own_names
from vllm_metal.api.usage import Usage
from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.errors import MetalError
from vllm_metal.parsing.events import Event
from vllm_metal.server import bodies, chat_answers
from vllm_metal.server.block_writer import BlockWriter, joined
from vllm_metal.server.chat_answers import ChatAnswers
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.request_id import request_id
from vllm_metal.server.thought_counter import ThoughtCounter

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


async def create(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, MessagesRequest)
    chat = messages_as_chats.chat(body)
    with in_own_names(OWN_NAMES):
        return await chat_answers.respond(request, chat, partial(MessageWording, request_id(request), body))


async def count_tokens(request: web.Request) -> web.Response:
    body = messages_as_chats.prompt(await bodies.read(request, CountTokensRequest))
    messages, template_kwargs = chat_answers.template_inputs(request, body)
    async with request.app[MANAGER].acquire(body.model) as engine:
        tokens = await engine.encode_chat(messages, **template_kwargs)
    return bodies.reply(TokenCount(len(tokens)))


class MessageWording:
    """Of the only choice there is."""

    named_events: ClassVar[bool] = True

    def __init__(self, request_id: str, body: MessagesRequest, answers: ChatAnswers) -> None:
        self._request_id = request_id
        self._model = answers.model
        [self._reader] = answers.readers
        self.thoughts: list[ThoughtCounter] = answers.thoughts
        shows_thinking = getattr(body.thinking, "display", None) != "omitted"
        self._writer = BlockWriter(shows_thinking=shows_thinking)
        self._unsaid: list[Event] = []
        self._has_begun = False
        self._end: MessageEnd

    def read(self, index: int, output: RequestOutput) -> bool:
        self._unsaid += self._reader.read(output)
        return self._reader.enough

    def opening(self) -> Sequence[MessageEvent]:
        # A message begins by telling how much of the prompt was kept, which is known with the first output.
        return []

    def deltas(self, index: int, output: RequestOutput, usage: Usage | UnsetType) -> Sequence[MessageEvent]:
        assert usage is not UNSET
        return [*self._beginning(usage), *self._said()]

    def closing(
        self, index: int, finish_reason: FinishReason, usage: Usage | UnsetType
    ) -> Sequence[MessageEvent]:
        self._end = self._told_end(finish_reason)
        return list(self._writer.end())

    def ending(self, usage: Usage) -> Sequence[MessageEvent]:
        return [MessageDelta(self._end, MessageUsage.of(usage)), MessageStop()]

    def failure(self, exc: MetalError) -> Sequence[MessageError]:
        return [message_errors.body(exc, self._request_id)]

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Message:
        [output] = outputs
        assert output.finish_reason is not None
        message, end = self._message(usage), self._told_end(output.finish_reason)
        message.content = joined([*self._said(), *self._writer.end()])
        message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
        return message

    def _beginning(self, usage: Usage) -> Iterator[MessageEvent]:
        if not self._has_begun:
            self._has_begun = True
            yield MessageStart(self._message(usage))
            yield Ping()

    def _said(self) -> Iterator[MessageEvent]:
        events, self._unsaid = self._unsaid, []
        return self._writer.write(events)

    def _message(self, usage: Usage) -> Message:
        return Message(f"msg_{self._request_id}", self._model, [], MessageUsage.of(usage))

    def _told_end(self, finish_reason: FinishReason) -> MessageEnd:
        reason = _STOP_REASONS[self._reader.finish_reason(finish_reason)]
        met = self._reader.stop_string
        if reason == "end_turn" and met is not None:
            return MessageEnd("stop_sequence", met)
        return MessageEnd(reason, None)
