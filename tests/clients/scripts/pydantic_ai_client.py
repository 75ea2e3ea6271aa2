"""pydantic-ai: an agent that answers in text, whole and streamed, and remembers."""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent, ModelSettings
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ANSWER = "The capital of France is Paris."
QUESTION = "Name the capital of France."

model = OpenAIChatModel("smollm2", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
agent = Agent(model, model_settings=ModelSettings(temperature=0, max_tokens=20))

first = agent.run_sync(QUESTION)
assert first.output == ANSWER
assert first.usage.output_tokens == 8

second = agent.run_sync("And of Italy?", message_history=first.all_messages())
assert "Rome" in second.output
assert second.usage.input_tokens > first.usage.input_tokens


async def stream() -> list[str]:
    async with agent.run_stream(QUESTION) as result:
        return [text async for text in result.stream_text(delta=True, debounce_by=None)]


pieces = asyncio.run(stream())
assert "".join(pieces) == ANSWER
