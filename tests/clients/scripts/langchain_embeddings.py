"""langchain-openai: documents and queries as vectors."""

from __future__ import annotations

import sys
from operator import mul

from langchain_openai import OpenAIEmbeddings

embeddings = OpenAIEmbeddings(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model="minilm", check_embedding_ctx_length=False,
    max_retries=0,
)  # fmt: skip
query = embeddings.embed_query("What is the weather like?")
assert len(query) == 384
assert len(embeddings.embed_documents(["one", "two", "three"])) == 3

weather, sunny, stadium = embeddings.embed_documents(
    ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
)
assert sum(map(mul, weather, sunny)) > 0.6 > 0.2 > sum(map(mul, weather, stadium))
