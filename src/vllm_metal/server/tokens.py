"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from vllm_metal.api.decoding import decode
from vllm_metal.api.tokens import (
    Detokenized,
    DetokenizeRequest,
    TokenizeChatRequest,
    Tokenized,
    TokenizeTextRequest,
)
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.engine.embedding_engine import EmbeddingEngine
from vllm_metal.server import bodies
from vllm_metal.server.chat_answers import template_inputs
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.model_loader import ServingEngine


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, or of the prompt that a chat makes."""
    content = await bodies.receive(request)
    if _has_messages(content):
        chat = decode(content, TokenizeChatRequest)
        messages, template_kwargs = template_inputs(request, chat)
        async with request.app[MANAGER].acquire(chat.model) as engine:
            tokens = await engine.encode_chat(messages, **template_kwargs)
            return _tokenized(engine, tokens, _strings(engine, tokens) if chat.return_token_strs else None)
    text = decode(content, TokenizeTextRequest)
    async with request.app[MANAGER].acquire_any(text.model) as engine:
        if isinstance(engine, EmbeddingEngine):
            tokens, strings = await engine.tokens(text.prompt, add_special_tokens=text.add_special_tokens)
        else:
            assert isinstance(engine, AsyncEngine)
            tokens = await engine.encode(text.prompt, add_special_tokens=text.add_special_tokens)
            strings = _strings(engine, tokens)
        return _tokenized(engine, tokens, strings if text.return_token_strs else None)


async def detokenize(request: web.Request) -> web.Response:
    body = await bodies.read(request, DetokenizeRequest)
    async with request.app[MANAGER].acquire_any(body.model) as engine:
        if isinstance(engine, EmbeddingEngine):
            text = await engine.text(body.tokens, param="tokens")
        else:
            assert isinstance(engine, AsyncEngine)
            text = await engine.decode(body.tokens, skip_special_tokens=False, param="tokens")
        return bodies.reply(Detokenized(text))


class _Form(Struct):
    messages: Any | UnsetType = UNSET


def _has_messages(content: bytes) -> bool:
    try:
        return msgspec.json.decode(content, type=_Form).messages is not UNSET
    except msgspec.DecodeError:
        return False


def _strings(engine: AsyncEngine, tokens: list[int]) -> list[str]:
    return [engine.token_bytes.spelling(token_id).decode(errors="replace") for token_id in tokens]


def _tokenized(engine: ServingEngine, tokens: list[int], strings: list[str] | None) -> web.Response:
    return bodies.reply(Tokenized(len(tokens), engine.max_model_len, tokens, strings))
