"""langchain-openai: what a chain does with a chat model, and its text completions."""

from __future__ import annotations

import asyncio
import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

BASE = f"{sys.argv[1]}/v1"
ANSWER = "The capital of France is Paris."

model = ChatOpenAI(
    base_url=BASE, api_key="none", model="smollm2", temperature=0, max_tokens=20, stream_usage=True,
    max_retries=0,
)  # fmt: skip
chain = ChatPromptTemplate.from_messages([("human", "Name the capital of {country}.")]) | model

whole = chain.invoke({"country": "France"})
assert whole.content == ANSWER
assert whole.response_metadata["finish_reason"] == "stop"
assert whole.usage_metadata["output_tokens"] == 8

pieces = list(chain.stream({"country": "France"}))
joined = pieces[0]
for piece in pieces[1:]:
    joined += piece
assert joined.content == ANSWER
assert joined.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]

assert [each.content for each in chain.batch([{"country": "France"}] * 3)] == [ANSWER] * 3
assert asyncio.run(chain.ainvoke({"country": "France"})).content == ANSWER

told = model.bind(logprobs=True, top_logprobs=2).invoke("Name the capital of France.")
assert all(len(entry["top_logprobs"]) == 2 for entry in told.response_metadata["logprobs"]["content"])

assert model.bind(stop=["Paris"]).invoke("Name the capital of France.").content == "The capital of France is "

completion = OpenAI(
    base_url=BASE, api_key="none", model="smollm2", temperature=0, max_tokens=4, max_retries=0
)
assert completion.invoke("The capital of France is").startswith(" Paris")
