"""POST /v1/rerank and /v1/score: how well texts go together, by a model that compares or by their vectors."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from operator import mul

from aiohttp import web
from msgspec import UNSET

from vllm_metal.api.embeddings import PoolingRequest, PoolingUsage, numbers
from vllm_metal.api.rerank import (
    Document,
    Reranking,
    RerankRequest,
    RerankResult,
    Score,
    ScoreRequest,
    Scores,
)
from vllm_metal.engine.embedding_engine import EmbeddingEngine
from vllm_metal.engine.embedding_request import num_tokens
from vllm_metal.server import bodies, generation
from vllm_metal.server.keys import MANAGER
from vllm_metal.server.request_id import request_id


async def rerank(request: web.Request) -> web.Response:
    """The documents, those that fit the query best first."""
    body = await bodies.read(request, RerankRequest)
    texts = body.texts()
    deadline = generation.deadline(request, body)
    async with request.app[MANAGER].acquire_a(EmbeddingEngine, body.model, deadline=deadline) as engine:
        engine.check_room()
        read = texts
        if body.max_tokens_per_doc is not None:
            read = await engine.cut(texts, body.max_tokens_per_doc)
        pairs = [(body.query, text) for text in read]
        scores, usage = await _compare(engine, pairs, body, deadline, ("query", "documents"))
        results = [
            RerankResult(index, score, Document(text) if body.return_documents else UNSET)
            for index, (score, text) in enumerate(zip(scores, texts, strict=True))
        ]
        results.sort(key=lambda result: -result.relevance_score)
        reply_id = f"rerank-{request_id(request)}"
        return bodies.reply(Reranking(reply_id, engine.name, usage, results[: body.top_n or None]))


async def score(request: web.Request) -> web.Response:
    """How well each pair of texts goes together."""
    body = await bodies.read(request, ScoreRequest)
    pairs = body.pairs()
    deadline = generation.deadline(request, body)
    async with request.app[MANAGER].acquire_a(EmbeddingEngine, body.model, deadline=deadline) as engine:
        engine.check_room()
        scores, usage = await _compare(engine, pairs, body, deadline, ("text_1", "text_2"))
        data = [Score(index, each) for index, each in enumerate(scores)]
        return bodies.reply(
            Scores(f"score-{request_id(request)}", int(time.time()), engine.name, data, usage)
        )


async def _compare(
    engine: EmbeddingEngine,
    pairs: Sequence[tuple[str, str]],
    body: PoolingRequest,
    deadline: float | None,
    params: tuple[str, str],
) -> tuple[list[float], PoolingUsage]:
    """A score for each pair, whose texts the client calls `params`."""
    max_tokens = body.max_tokens(engine.max_model_len)
    if engine.traits.compares:
        inputs = await engine.encode_pairs(pairs, max_tokens=max_tokens)
        engine.check(inputs, params[1])
        vectors = await engine.compute(inputs, deadline=deadline)
        return [numbers(vector)[0] for vector in vectors], PoolingUsage.of(num_tokens(inputs))
    # One query often stands before many documents.
    places = {first: place for place, first in enumerate(dict.fromkeys(first for first, _ in pairs))}
    prompts = engine.traits.prompts
    inputs = await engine.encode(
        [prompts.get("query", "") + query for query in places]
        + [prompts.get("document", "") + second for _, second in pairs],
        max_tokens=max_tokens,
    )
    places_of_firsts = [places[first] for first, _ in pairs]
    engine.check([inputs[place] for place in (places_of_firsts if len(places) > 1 else [0])], params[0])
    engine.check(inputs[len(places) :], params[1])
    vectors = await engine.compute(inputs, deadline=deadline)
    firsts = [vectors[place] for place in places_of_firsts]
    # Not on the loop, where others' tokens would wait for it.
    scores = await asyncio.to_thread(_cosines, firsts, vectors[len(places) :])
    return scores, PoolingUsage.of(num_tokens(inputs))


def _cosines(firsts: Sequence[bytes], seconds: Sequence[bytes]) -> list[float]:
    return [_cosine(numbers(first), numbers(second)) for first, second in zip(firsts, seconds, strict=True)]


def _cosine(first: list[float], second: list[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(mul, first, second)) / lengths if lengths else 0.0
