"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
from aiohttp import web

from vllm_metal.api.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EncodingFormat,
    PoolingUsage,
)
from vllm_metal.engine.embedding_engine import EmbeddingEngine
from vllm_metal.engine.embedding_request import EmbeddingInput, num_tokens
from vllm_metal.errors import InvalidRequest
from vllm_metal.server import bodies, generation
from vllm_metal.server.keys import MANAGER


async def embeddings(request: web.Request) -> web.Response:
    body = await bodies.read(request, EmbeddingRequest)
    asked = body.inputs()
    deadline = generation.deadline(request, body)
    async with request.app[MANAGER].acquire_a(EmbeddingEngine, body.model, deadline=deadline) as engine:
        if engine.traits.compares:
            raise InvalidRequest(
                f"the model `{engine.name}` compares texts, and makes no vectors of them",
                param="model",
                hint="ask it at `/v1/rerank` or `/v1/score`",
            )
        engine.check_room()
        inputs = await _inputs(engine, asked, body)
        vectors = await engine.compute(inputs, deadline=deadline)
        # Piece by piece and not on the loop, where others' tokens would wait for it.
        data = await asyncio.to_thread(_encoded, vectors, body.encoding_format)
        return bodies.reply(EmbeddingList(data, engine.name, PoolingUsage.of(num_tokens(inputs))))


async def _inputs(
    engine: EmbeddingEngine, asked: list[str] | list[list[int]], body: EmbeddingRequest
) -> list[EmbeddingInput]:
    """Raises InvalidRequest, and PromptTooLong."""
    if body.dimensions is not None:
        engine.traits.check_dimensions(body.dimensions)
    prompt = engine.traits.prompt(body.prompt_name)
    max_tokens = body.max_tokens(engine.max_model_len)
    if isinstance(asked[0], str):
        texts = [prompt + text for text in asked]
        inputs = await engine.encode(texts, max_tokens=max_tokens)
    else:
        inputs = [EmbeddingInput(token_ids[:max_tokens]) for token_ids in asked]
    engine.check(inputs, "input")
    return [replace(each, dimensions=body.dimensions) for each in inputs]


def _encoded(vectors: Sequence[bytes], encoding_format: EncodingFormat) -> list[Embedding]:
    """As JSON already."""
    encoded = [
        msgspec.Raw(msgspec.json.encode(Embedding.of(index, vector, encoding_format)))
        for index, vector in enumerate(vectors)
    ]
    return cast("list[Embedding]", encoded)
