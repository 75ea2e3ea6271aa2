"""Reranking in the shape that Cohere, Jina and vLLM share, and vLLM's scores: requests and replies."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType

from vllm_metal.api.embeddings import MAX_INPUTS, PoolingRequest, PoolingUsage
from vllm_metal.errors import InvalidRequest


class Document(Struct):
    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    """`max_tokens_per_doc` cuts documents, query not counted."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {"rank_fields": ([], ["text"])}

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool = True
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None

    def texts(self) -> list[str]:
        """Raises InvalidRequest for none or too many."""
        _check_number(len(self.documents), "documents")
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RerankResult(Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Reranking(Struct):
    """`results` begin with the most relevant."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class ScoreRequest(PoolingRequest, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> list[tuple[str, str]]:
        """One text with each of the others, or each with its counterpart. Raises InvalidRequest."""
        firsts = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        seconds = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        _check_number(len(firsts), "text_1")
        _check_number(len(seconds), "text_2")
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            raise InvalidRequest(
                f"`text_1` has {len(firsts)} texts and `text_2` has {len(seconds)}",
                param="text_2",
                hint="give one text and many, or as many of both",
            )
        return list(zip(firsts, seconds, strict=True))


class Score(Struct, tag_field="object", tag="score"):
    index: int
    score: float


class Scores(Struct, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


def _check_number(num_texts: int, param: str) -> None:
    if not 1 <= num_texts <= MAX_INPUTS:
        raise InvalidRequest(
            f"`{param}` must have between 1 and {MAX_INPUTS} texts, not {num_texts}", param=param
        )
