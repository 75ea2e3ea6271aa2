"""vLLM's endpoints between text and token ids: requests and replies."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.api.request_body import NUM_TOKENS, RequestBody


class TokenizeTextRequest(RequestBody, kw_only=True):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatCompletionRequest, kw_only=True):
    """Any request for a chat completion, to see the prompt that it makes."""

    return_token_strs: bool = False


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody, kw_only=True):
    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], NUM_TOKENS]


class Detokenized(Struct):
    prompt: str
