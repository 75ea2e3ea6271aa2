"""OpenAI's completions: requests and replies."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from vllm_metal.api.generation import GenerationRequest, NumLogprobs
from vllm_metal.api.prompt_logprobs import PromptLogprobs
from vllm_metal.api.ranges import RANGES
from vllm_metal.api.request_body import NUM_TOKENS
from vllm_metal.api.usage import Usage
from vllm_metal.errors import InvalidRequest


class CompletionRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = GenerationRequest.unsupported | {
        "prompt_embeds": (),
    }

    prompt: str | Annotated[list[str | int | list[int]], NUM_TOKENS]
    suffix: str = ""
    add_special_tokens: bool = True
    max_tokens: Annotated[int, RANGES["max_tokens"]] | None = 16
    logprobs: NumLogprobs | None = None
    echo: bool = False

    def sampling(self) -> dict[str, Any]:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("`max_tokens` must be at least 1 without `echo`", param="max_tokens")
        for param in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, param):
                raise InvalidRequest(f"`{param}` cannot go with `suffix`", param=param)
        asked = super().sampling()
        if self.logprobs is not None:
            asked["logprobs"] = self.logprobs
            if self.echo:
                asked["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return asked

    def prompts(self) -> list[str | list[int]]:
        """Each as text or as token ids. Raises InvalidRequest for a mixture."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [item for item in self.prompt if not isinstance(item, int)]
        if not texts:
            return [[item for item in self.prompt if isinstance(item, int)]]
        if len(texts) < len(self.prompt):
            raise InvalidRequest("`prompt` must not mix token ids with other prompts", param="prompt")
        return list(texts)


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct):
    text: str
    finish_reason: str | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, tag_field="object", tag="text_completion"):
    """The whole answer, and a chunk of it too: they differ in nothing but `finish_reason` and `usage`."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET
