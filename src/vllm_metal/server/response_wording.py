"""Puts an answer as one of OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from msgspec import UnsetType

from vllm_metal.api import errors
from vllm_metal.api.response_events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from vllm_metal.api.responses import (
    IncompleteDetails,
    Response,
    ResponseFault,
    ResponsesRequest,
    ResponseUsage,
)
from vllm_metal.api.usage import Usage
from vllm_metal.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from vllm_metal.errors import MetalError
from vllm_metal.parsing.events import ReasoningDelta
from vllm_metal.server import logprobs
from vllm_metal.server.chat_answers import ChatAnswers
from vllm_metal.server.response_output import OutputWriter
from vllm_metal.server.thought_counter import ThoughtCounter


@dataclass(slots=True)
class ResponseWording:
    """`keep` gets the response once it has ended, before its client does."""

    named_events: ClassVar[bool] = True

    id: str
    body: ResponsesRequest
    keep: Callable[[Response], None]
    answers: ChatAnswers
    created: int = field(default_factory=lambda: int(time.time()))
    _writer: OutputWriter = field(init=False)
    _events: list[ResponseEvent] = field(default_factory=list, init=False)
    _num_sent: int = field(default=0, init=False)
    _logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    _thoughts: ThoughtCounter | None = field(default=None, init=False)
    _is_cut: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._writer = OutputWriter(self.body.offered_tools(), seals_reasoning=self.body.seals_reasoning)
        if self.answers.thoughts:
            self._thoughts = copy(self.answers.thoughts[0])  # the other one is the tally's

    @property
    def thoughts(self) -> list[ThoughtCounter]:
        return self.answers.thoughts

    def read(self, index: int, output: RequestOutput) -> bool:
        (reader,) = self.answers.readers
        self._logprobs += filter(self._is_text, output.logprobs)
        for event in reader.read(output):
            told: list[TokenLogprobs] = []
            if not isinstance(event, ReasoningDelta):
                # What calls are made of is told nowhere.
                told, self._logprobs = self._logprobs, []
            self._events += self._writer.write(event, logprobs.of_chat(told, self.answers.names).content)
        return reader.enough

    def _is_text(self, token: TokenLogprobs) -> bool:
        """False for tokens of reasoning, and for those that end the answer or mark a part of it."""
        if self._thoughts is not None:
            before = self._thoughts.num_tokens
            self._thoughts.count([token.token_id])
            if self._thoughts.num_tokens > before:
                return False
        return bool(self.answers.names.token_bytes[token.token_id])

    def opening(self) -> list[ResponseEvent]:
        begun = self._response("in_progress")
        return self._numbered([ResponseCreated(response=begun), ResponseInProgress(response=begun)])

    def deltas(self, index: int, output: RequestOutput, usage: Usage | UnsetType) -> list[ResponseEvent]:
        events, self._events = self._events, []
        return self._numbered(events)

    def closing(
        self, index: int, finish_reason: FinishReason, usage: Usage | UnsetType
    ) -> list[ResponseEvent]:
        self._is_cut = finish_reason is FinishReason.LENGTH
        return self._numbered(self._writer.finish("incomplete" if self._is_cut else "completed"))

    def ending(self, usage: Usage) -> list[ResponseEvent]:
        kind = ResponseIncomplete if self._is_cut else ResponseCompleted
        return self._numbered([kind(response=self._ended(usage))])

    def failure(self, exc: MetalError) -> list[ResponseEvent]:
        response = self._response("failed")
        response.error = ResponseFault(errors.body(exc).error.message)
        return self._numbered([ResponseFailed(response=response)])

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Response:
        (output,) = outputs
        assert output.finish_reason is not None
        self.closing(0, output.finish_reason, usage)
        return self._ended(usage)

    def _ended(self, usage: Usage) -> Response:
        response = self._response("incomplete" if self._is_cut else "completed")
        response.usage = ResponseUsage.of(usage)
        if self._is_cut:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = int(time.time())
        self.keep(response)
        return response

    def _response(self, status: Literal["in_progress", "completed", "incomplete", "failed"]) -> Response:
        body, params = self.body, self.answers.params
        return Response(
            id=self.id,
            created_at=self.created,
            model=self.answers.model,
            status=status,
            output=list(self._writer.items),
            temperature=params.temperature,
            top_p=params.top_p,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning,
            store=body.store,
            text=body.text,
            tool_choice=body.tool_choice,
            tools=[tool.echoed() for tool in body.tools if tool.is_offered],
            top_logprobs=body.top_logprobs,
            truncation=body.truncation,
        )

    def _numbered(self, events: Iterable[ResponseEvent]) -> list[ResponseEvent]:
        numbered = list(events)
        for event in numbered:
            event.sequence_number = self._num_sent
            self._num_sent += 1
        return numbered
