"""OpenAI's responses: requests and replies."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from vllm_metal.api import response_conversation
from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.api.generation import GenerationRequest, NumLogprobs, Positive
from vllm_metal.api.response_items import InputItem, OutputItem
from vllm_metal.api.response_tools import OfferedTool, ResponseToolChoice, ResponseTools, chosen, offered
from vllm_metal.api.structured_outputs import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    Schema,
    TextFormat,
)
from vllm_metal.api.usage import Usage
from vllm_metal.errors import InvalidRequest

_LOGPROBS = "message.output_text.logprobs"
_SEALED_REASONING = "reasoning.encrypted_content"

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Truncation = Literal["auto", "disabled"]
InputItems = Annotated[list[InputItem], Meta(max_length=16_384)]


class ReasoningOptions(Struct):
    """No summaries are made, whatever `summary` asks for: the reasoning itself is told."""

    effort: str | None = None
    summary: str | None = None


class TextSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    schema: Schema
    name: str = "schema"
    description: str | UnsetType | None = UNSET
    strict: bool | None = None


class TextOptions(Struct):
    format: TextFormat | JsonObjectFormat | TextSchemaFormat = msgspec.field(default_factory=TextFormat)


class ResponsesRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = GenerationRequest.unsupported | {
        "background": (False,),
        "best_of": (1,),
        "context_management": ([],),
        "conversation": (),
        "max_tokens": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
        "response_format": (),
        "return_token_ids": (False,),
    }
    without_effect: ClassVar[frozenset[str]] = (
        GenerationRequest.without_effect | {"max_tool_calls", "prompt_cache_options"}
    ) - {"metadata", "store"}
    successors: ClassVar[dict[str, str]] = {
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    input: str | InputItems
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    metadata: Metadata = msgspec.field(default_factory=dict)
    include: Annotated[list[str], Meta(max_length=64)] = msgspec.field(default_factory=list)
    max_output_tokens: Positive | None = None
    top_logprobs: NumLogprobs = 0
    reasoning: ReasoningOptions = msgspec.field(default_factory=ReasoningOptions)
    text: TextOptions = msgspec.field(default_factory=TextOptions)
    truncation: Truncation = "disabled"
    tools: ResponseTools = msgspec.field(default_factory=list)
    tool_choice: ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None

    def items(self) -> list[InputItem]:
        """Raises InvalidRequest for one that is not understood."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        for i, item in enumerate(self.input):
            item.check(f"input[{i}]")
        return self.input

    def offered_tools(self) -> list[OfferedTool]:
        """Raises InvalidRequest."""
        return offered(self.tools)

    def chat(self, items: list[InputItem]) -> ChatCompletionRequest:
        """The chat that this response is to go on with: `items` are those before it and its own.

        Raises InvalidRequest.
        """
        messages = response_conversation.messages(self.instructions, items)
        if not messages:
            raise InvalidRequest("`input` is empty", param="input")
        tools, tool_choice = chosen(self.offered_tools(), self.tool_choice)
        shared = {name: getattr(self, name) for name in GenerationRequest.__struct_fields__}
        return ChatCompletionRequest(
            **shared
            | {
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": self.top_logprobs > 0 or _LOGPROBS in self.include,
                "top_logprobs": self.top_logprobs,
                "reasoning_effort": self.reasoning.effort,
                "response_format": self._response_format(),
                "tools": tools,
                "tool_choice": tool_choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "chat_template_kwargs": self.chat_template_kwargs,
                "thinking_token_budget": self.thinking_token_budget,
            }
        )

    def _response_format(self) -> ResponseFormat:
        match self.text.format:
            case TextSchemaFormat(schema, name):
                return JsonSchemaFormat(NamedSchema(schema, name))
            case TextFormat() | JsonObjectFormat() as same:
                return same

    @property
    def seals_reasoning(self) -> bool:
        return _SEALED_REASONING in self.include


#: What fields of the chat are called here.
OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tools": "tools",
}


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.completion_tokens_details
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(details.reasoning_tokens if details else 0),
            usage.total_tokens,
        )


class ResponseFault(Struct):
    message: str
    code: Literal["server_error"] = "server_error"


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class Response(Struct, kw_only=True, tag_field="object", tag="response"):
    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    completed_at: int | None = None
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | UnsetType = UNSET
    temperature: float
    top_p: float
    background: bool = False
    truncation: Truncation
    instructions: str | None
    max_output_tokens: int | None
    metadata: Metadata
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    store: bool
    text: TextOptions
    tool_choice: ResponseToolChoice
    tools: list[dict[str, Any]]
    top_logprobs: int


class DeletedResponse(Struct, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class ResponseQuery(Struct):
    """Only responses made in the background could be streamed again."""

    stream: bool = False


class ItemsQuery(Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ResponseItemList(Struct, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
