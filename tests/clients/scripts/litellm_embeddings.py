"""litellm: vectors under both of its names for such a server, and reranking."""

from __future__ import annotations

import sys

import litellm

BASE = f"{sys.argv[1]}/v1"
DOCUMENTS = ["one two", "three", "four five six"]

for provider in ("openai", "hosted_vllm"):
    reply = litellm.embedding(
        model=f"{provider}/minilm", input=["one", "two words"], api_base=BASE, api_key="none"
    )
    assert [len(each["embedding"]) for each in reply.data] == [384, 384]
    assert reply.usage.prompt_tokens == 7

for model in ("reranker", "minilm"):
    ranked = litellm.rerank(
        model=f"hosted_vllm/{model}", query="a query", documents=DOCUMENTS, top_n=2, return_documents=True,
        api_base=BASE, api_key="none",
    )  # fmt: skip
    assert len(ranked.results) == 2
    scores = [each["relevance_score"] for each in ranked.results]
    assert scores == sorted(scores, reverse=True)
    assert all(each["document"]["text"] == DOCUMENTS[each["index"]] for each in ranked.results)
