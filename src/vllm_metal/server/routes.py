"""Every route: what it does, for the descriptions of the API, and what answers it."""

from __future__ import annotations

from typing import Literal, get_args

from aiohttp.typedefs import Handler

from vllm_metal.api.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from vllm_metal.api.completions import Completion, CompletionRequest
from vllm_metal.api.embeddings import EmbeddingList, EmbeddingRequest
from vllm_metal.api.folders import ModelFolders
from vllm_metal.api.health import Health, Load, Version
from vllm_metal.api.message_errors import MessageError
from vllm_metal.api.message_replies import Message, MessageEvent
from vllm_metal.api.messages import CountTokensRequest, MessagesRequest, TokenCount
from vllm_metal.api.models import Model, ModelList
from vllm_metal.api.openapi import Operation
from vllm_metal.api.rerank import Reranking, RerankRequest, ScoreRequest, Scores
from vllm_metal.api.residency import LoadRequest, UnloadRequest
from vllm_metal.api.response_events import EVENTS as RESPONSE_EVENTS
from vllm_metal.api.responses import (
    DeletedResponse,
    ItemsQuery,
    Response,
    ResponseItemList,
    ResponseQuery,
    ResponsesRequest,
)
from vllm_metal.api.status import ModelStatus, ServerStatus
from vllm_metal.api.tokens import (
    Detokenized,
    DetokenizeRequest,
    TokenizeChatRequest,
    Tokenized,
    TokenizeTextRequest,
)
from vllm_metal.server import (
    about,
    chat,
    completions,
    embeddings,
    folders,
    health,
    messages,
    metrics,
    models,
    rerank,
    residency,
    responses,
    status,
    tokens,
)


def _probe(
    method: Literal["get", "post"], path: str, handler: Handler = health.health
) -> tuple[Operation, Handler]:
    what = "the default model would answer" if handler is health.ready else "requests are taken"
    return Operation(method, path, f"Whether {what} now", Health, replies={503: Health}, open=True), handler


def _rerank(path: str) -> tuple[Operation, Handler]:
    summary = "Documents by how well they fit a query"
    return Operation("post", path, summary, Reranking, bodies=(RerankRequest,)), rerank.rerank


def _score(path: str) -> tuple[Operation, Handler]:
    summary = "How well pairs of texts go together"
    return Operation("post", path, summary, Scores, bodies=(ScoreRequest,)), rerank.score


ROUTES: tuple[tuple[Operation, Handler], ...] = (
    (
        Operation(
            "post",
            "/v1/chat/completions",
            "The next message of a chat",
            ChatCompletion,
            bodies=(ChatCompletionRequest,),
            events=(ChatCompletionChunk,),
        ),
        chat.chat_completions,
    ),
    (
        Operation(
            "post",
            "/v1/completions",
            "The continuation of a text",
            Completion,
            bodies=(CompletionRequest,),
            events=(Completion,),
        ),
        completions.completions,
    ),
    (
        Operation(
            "post",
            "/v1/embeddings",
            "Vectors of texts",
            EmbeddingList,
            bodies=(EmbeddingRequest,),
        ),
        embeddings.embeddings,
    ),
    _rerank("/v1/rerank"),
    _rerank("/v2/rerank"),
    _rerank("/rerank"),
    _score("/v1/score"),
    _score("/score"),
    (
        Operation(
            "post",
            "/v1/messages",
            "The next message of a chat, in the words of Anthropic's API",
            Message,
            bodies=(MessagesRequest,),
            events=(*get_args(MessageEvent), MessageError),
            error=MessageError,
        ),
        messages.create,
    ),
    (
        Operation(
            "post",
            "/v1/messages/count_tokens",
            "How many tokens of a chat the model would read",
            TokenCount,
            bodies=(CountTokensRequest,),
            error=MessageError,
        ),
        messages.count_tokens,
    ),
    (
        Operation(
            "post",
            "/v1/responses",
            "The answer to messages, results of calls and what came before them",
            Response,
            bodies=(ResponsesRequest,),
            events=RESPONSE_EVENTS,
        ),
        responses.create,
    ),
    (
        Operation(
            "get",
            "/v1/responses/{response_id}",
            "A response that has been kept",
            Response,
            query=ResponseQuery,
        ),
        responses.retrieve,
    ),
    (
        Operation("delete", "/v1/responses/{response_id}", "Keep a response no longer", DeletedResponse),
        responses.delete,
    ),
    (
        Operation(
            "post",
            "/v1/responses/{response_id}/cancel",
            "Nothing yet: only responses made in the background can be cancelled",
            Response,
        ),
        responses.cancel,
    ),
    (
        Operation(
            "get",
            "/v1/responses/{response_id}/input_items",
            "What came before the answer",
            ResponseItemList,
            query=ItemsQuery,
        ),
        responses.input_items,
    ),
    (Operation("get", "/v1/models", "The models that are served", ModelList), models.list_models),
    (Operation("get", "/v1/models/{id}", "One of them", Model), models.get_model),
    (
        Operation(
            "post",
            "/tokenize",
            "The tokens of a text, or of the prompt that a chat makes",
            Tokenized,
            bodies=(TokenizeChatRequest, TokenizeTextRequest),
        ),
        tokens.tokenize,
    ),
    (
        Operation("post", "/detokenize", "The text of tokens", Detokenized, bodies=(DetokenizeRequest,)),
        tokens.detokenize,
    ),
    _probe("get", "/health"),
    _probe("get", "/ready", health.ready),
    _probe("get", "/ping"),
    _probe("post", "/ping"),
    (Operation("get", "/version", "The server's version", Version), health.version),
    (Operation("get", "/load", "How many requests run or wait", Load), health.load),
    (Operation("get", "/metrics", "Figures in Prometheus's format", "text/plain"), metrics.metrics),
    (
        Operation("get", "/admin/status", "The server, its models and its requests", ServerStatus),
        status.status,
    ),
    (
        Operation("post", "/admin/models/load", "Load a model", ModelStatus, bodies=(LoadRequest,)),
        residency.load,
    ),
    (
        Operation(
            "post",
            "/admin/models/unload",
            "Unload a model when its requests have ended",
            ModelStatus,
            bodies=(UnloadRequest,),
        ),
        residency.unload,
    ),
    (
        Operation("get", "/admin/model-folders", "Which folders of models the server can read", ModelFolders),
        folders.model_folders,
    ),
    (Operation("get", "/openapi.json", "This description", "application/json"), about.openapi),
    (Operation("get", "/", "A page for people", "text/html"), about.index),
)
