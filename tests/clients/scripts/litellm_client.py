"""litellm: chats, streams, text completions and errors, under both of its names for such a server."""

from __future__ import annotations

import asyncio
import sys

import litellm

BASE = f"{sys.argv[1]}/v1"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
FIELDS = {"api_base": BASE, "api_key": "none", "temperature": 0}

litellm.num_retries = 0
for provider in ("openai", "hosted_vllm"):
    model = f"{provider}/smollm2"
    whole = litellm.completion(model=model, messages=QUESTION, **FIELDS)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = list(
        litellm.completion(
            model=model, messages=QUESTION, stream=True, stream_options={"include_usage": True}, **FIELDS
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert litellm.stream_chunk_builder(chunks).usage.total_tokens == whole.usage.total_tokens

answer = litellm.completion(
    model="openai/smollm2", messages=QUESTION, logprobs=True, top_logprobs=2, n=2, max_tokens=4, **FIELDS
)
assert [choice.index for choice in answer.choices] == [0, 1]
assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * 4
assert answer.choices[0].finish_reason == "length"


async def ask() -> str:
    answer = await litellm.acompletion(model="openai/smollm2", messages=QUESTION, **FIELDS)
    return answer.choices[0].message.content


assert asyncio.run(ask()) == "The capital of France is Paris."

text = litellm.text_completion(
    model="text-completion-openai/smollm2", prompt="The capital of France is", max_tokens=4, **FIELDS
)
assert text.choices[0].text.startswith(" Paris")

assert litellm.get_valid_models(
    check_provider_endpoint=True, custom_llm_provider="openai", api_key="none", api_base=BASE
) == ["smollm2"]

for model, fields, expected in (
    ("openai/other", {}, litellm.NotFoundError),
    ("openai/smollm2", {"top_p": 7}, litellm.BadRequestError),
    ("openai/smollm2", {"messages": [{"role": "user", "content": "word " * 9000}]},
     litellm.ContextWindowExceededError),
):  # fmt: skip
    try:
        litellm.completion(model=model, **{"messages": QUESTION, **FIELDS, **fields})
    except expected:
        continue
    raise AssertionError(f"{model} {fields}: no {expected.__name__}")
