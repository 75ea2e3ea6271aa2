"""OpenAI's completions: requests and replies."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from vllm_metal.api.generation import GenerationRequest, NumLogprobs, Positive
from vllm_metal.api.usage import Usage
from vllm_metal.errors import InvalidRequest


class CompletionRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = GenerationRequest.unsupported | {
        "prompt_embeds": (),
    }

    prompt: str | list[str | int | list[int]]
    suffix: str = ""
    add_special_tokens: bool = True
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


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


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
