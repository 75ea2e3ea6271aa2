"""OpenAI's requests and replies. A null field is an absent one; see `decoding.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from vllm_metal.errors import InvalidRequest

#: What steers the rendering of a chat template: never a variable of the template.
RENDERING_PARAMETERS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "max_tokens",
        "messages",
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

Positive = Annotated[int, Meta(ge=1)]
StopStrings = Annotated[list[str], Meta(max_length=16)]
Words = list[Annotated[str, Meta(min_length=1)]]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What both generating endpoints take.

    `unsupported` names the fields that are known but not honoured yet. The values listed there ask for
    nothing, so they pass; any other is refused. Fields of `without_effect` change no answer and may hold
    anything.
    """

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "best_of": (1,),
        "early_stopping": (False,),
        "echo": (False,),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "n": (1,),
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": ({},),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "metadata",
            "parallel_tool_calls",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "verbosity",
        }
    )

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Words | None = None
    seed: int | None = None
    max_tokens: Positive | None = None
    min_tokens: int | None = None
    stop: str | StopStrings | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    skip_reading_prefix_cache: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """What the client asked of the sampler: SamplingParams' arguments, without those left open.

        `bad_words` are not among them, since only the model can tell their tokens. Raises InvalidRequest.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": tuple(_with_token_ids(self.logit_bias)) if self.logit_bias else None,
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": tuple(stop) if stop else None,
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
            "ignore_eos": self.ignore_eos,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "skip_reading_prefix_cache": self.skip_reading_prefix_cache,
        }
        return {name: value for name, value in asked.items() if value is not None}


def _with_token_ids(logit_bias: dict[str, float]) -> Iterator[tuple[int, float]]:
    for key, bias in logit_bias.items():
        # More digits than any vocabulary takes are not worth reading.
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest("the keys of `logit_bias` must be token ids", param="logit_bias")
        yield int(key), bias


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
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """As chat templates take it; raises InvalidRequest, naming the field below `path`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(f"{path}.content"),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self, path: str) -> str:
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
        return "\n".join(part.text or "" for part in self.content)


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = GenerationRequest.unsupported | {
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    max_completion_tokens: Positive | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs
        elif self.top_logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        return asked

    def template_messages(self) -> list[dict[str, Any]]:
        """Raises InvalidRequest for content that is not text."""
        return [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """Raises InvalidRequest for names that are not the client's to set."""
        if reserved := (RENDERING_PARAMETERS | _SERVER_VARIABLES) & self.chat_template_kwargs.keys():
            name = min(reserved)
            raise InvalidRequest(
                f"`{name}` may not be set in `chat_template_kwargs`", param=f"chat_template_kwargs.{name}"
            )
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs, "add_generation_prompt": self.add_generation_prompt}


class CompletionRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = GenerationRequest.unsupported | {
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: str | list[str | int | list[int]]
    max_tokens: Positive | None = 16
    logprobs: NumLogprobs | None = None

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | ({} if self.logprobs is None else {"logprobs": self.logprobs})

    def single_prompt(self) -> str | list[int]:
        """The prompt, as text or as token ids; raises InvalidRequest unless there is exactly one."""
        if isinstance(self.prompt, str):
            return self.prompt
        token_ids = [item for item in self.prompt if isinstance(item, int)]
        if len(token_ids) == len(self.prompt):
            return token_ids
        if len(self.prompt) > 1:
            raise InvalidRequest("several prompts in one request are not supported yet", param="prompt")
        [only] = self.prompt
        assert not isinstance(only, int)
        return only


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AssistantMessage(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    message: AssistantMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET


class TextChoice(Struct):
    text: str
    finish_reason: str | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None


class Completion(Struct, tag_field="object", tag="text_completion"):
    """The whole answer, and a chunk of it too: they differ in nothing but `finish_reason` and `usage`."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET


class Model(Struct, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str = "vllm-metal"


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[Model]
