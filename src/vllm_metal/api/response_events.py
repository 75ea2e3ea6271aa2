"""Events of a streamed response, in the order in which they come."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from vllm_metal.api.chat import TokenLogprob
from vllm_metal.api.response_items import OutputItem, OutputText, ReasoningText
from vllm_metal.api.responses import Response


class ResponseEvent(Struct, kw_only=True, tag_field="type"):
    """Numbered by the one who sends it."""

    sequence_number: int = 0


class ResponseCreated(ResponseEvent, tag="response.created"):
    response: Response


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    response: Response


class OutputItemAdded(ResponseEvent, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent, kw_only=True):
    output_index: int
    item_id: str


class ContentPartAdded(ItemEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText
    content_index: int = 0


class OutputTextDelta(ItemEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    content_index: int = 0


class OutputTextDone(ItemEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    content_index: int = 0


class ReasoningTextDelta(ItemEvent, tag="response.reasoning_text.delta"):
    delta: str
    content_index: int = 0


class ReasoningTextDone(ItemEvent, tag="response.reasoning_text.done"):
    text: str
    content_index: int = 0


class ContentPartDone(ItemEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText
    content_index: int = 0


class FunctionCallArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class FunctionCallArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomToolCallInputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomToolCallInputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    input: str


class OutputItemDone(ResponseEvent, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    response: Response


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    response: Response


class ResponseFailed(ResponseEvent, tag="response.failed"):
    response: Response


EVENTS = (
    ResponseCreated,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
)
