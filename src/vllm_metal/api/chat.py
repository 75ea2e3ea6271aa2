"""OpenAI's chat completions: requests and replies."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from vllm_metal.api import tools as tool_types
from vllm_metal.api.generation import GenerationRequest, NumLogprobs, Positive
from vllm_metal.api.prompt_logprobs import PromptLogprobs
from vllm_metal.api.tools import NamedToolChoice, Tool, ToolChoice, Tools
from vllm_metal.api.usage import Usage
from vllm_metal.errors import InvalidRequest

#: What steers the rendering of a chat template: never a variable of the template.
RENDERING_PARAMETERS = frozenset(
    {
        "add_special_tokens",
        "chat_template",
        "conversation",
        "max_length",
        "max_tokens",
        "messages",
        "only_end",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)

# Variables that other fields of a request set.
_SERVER_VARIABLES = frozenset({"add_generation_prompt", "continue_final_message", "documents", "tools"})

#: What templates call the reasoning of a message.
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")

ChatTemplate = Annotated[str, Meta(min_length=1, max_length=65_536)]


class ContentPart(Struct):
    type: str
    text: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str = "{}"


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"

    def for_template(self) -> dict[str, Any]:
        """Templates print the arguments themselves, so they get them parsed."""
        arguments: Any = self.function.arguments
        # A model may have written bad JSON; the template gets that as it is.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    def for_template(self, path: str) -> dict[str, Any]:
        """As chat templates take it; raises InvalidRequest, naming the field below `path`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._content(f"{path}.content"),
        }
        if self.name is not None:
            message["name"] = self.name
        if reasoning := self.reasoning or self.reasoning_content:
            message |= dict.fromkeys(REASONING_KEYS, reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _content(self, path: str) -> str | list[dict[str, str]]:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant":
                return ""
            raise InvalidRequest(f"`{path}` is required", param=path)
        for i, part in enumerate(self.content):
            if part.type != "text":
                raise InvalidRequest(
                    f"content of type `{part.type}` is not supported yet", param=f"{path}[{i}].type"
                )
        return [{"type": "text", "text": part.text or ""} for part in self.content]


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = GenerationRequest.unsupported | {
        "audio": (),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
    }
    successors: ClassVar[dict[str, str]] = {"function_call": "tool_choice", "functions": "tools"}
    #: Whether to refuse a `thinking_token_budget` that this model's reasoning cannot be held to.
    insists_on_budget: ClassVar[bool] = True

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=16_384)]
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    max_completion_tokens: Positive | None = None
    tools: Tools = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs
        elif self.top_logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        return asked

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        match self.tool_choice:
            case "none":
                return []
            case NamedToolChoice(function):
                return [tool for tool in self.tools if tool.function.name == function.name]
        return self.tools

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the template tells the model of."""
        return self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer is to be nothing but calls."""
        return self.tool_choice not in ("none", "auto")

    def template_messages(self) -> list[dict[str, Any]]:
        """Raises InvalidRequest for content that is not text."""
        return [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """What steers the template. Raises InvalidRequest for names that are not the client's, for tools
        that none could call, and where the answer would both begin a message and go on with one.
        """
        tool_types.check(self.tools, self.tool_choice)
        if reserved := (RENDERING_PARAMETERS | _SERVER_VARIABLES) & self.chat_template_kwargs.keys():
            name = min(reserved)
            raise InvalidRequest(
                f"`{name}` may not be set in `chat_template_kwargs`", param=f"chat_template_kwargs.{name}"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "`continue_final_message` and `add_generation_prompt` cannot both be true",
                param="continue_final_message",
            )
        generation_prompt = self.add_generation_prompt
        if generation_prompt is None:
            generation_prompt = not self.continue_final_message
        given: dict[str, Any] = {
            "reasoning_effort": self.reasoning_effort,
            "documents": self.documents,
            "chat_template": self.chat_template,
            "tools": self._tools_shown(),
        }
        if self.reasoning_effort == "none":
            # What most templates call it that know of no effort.
            given |= {"enable_thinking": False, "thinking": False}
        return {name: value for name, value in given.items() if value is not None} | {
            **self.chat_template_kwargs,
            "add_generation_prompt": generation_prompt,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": self.add_special_tokens,
        }

    def _tools_shown(self) -> list[dict[str, Any]] | None:
        """All of them, whichever must be called: so prompts that begin alike stay so."""
        return [tool.for_template() for tool in self.shown_tools] or None if self.offered_tools else None


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    message: AssistantMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionCallDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first of a call has all but arguments, the others nothing else."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
