"""pydantic-ai: an agent that answers in text, whole and streamed, remembers, and extracts a type."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
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


class Person(BaseModel):
    name: str
    age: int


extracting = Agent(
    model,
    output_type=NativeOutput(Person),
    model_settings=ModelSettings(temperature=0, max_tokens=60),
    retries=0,
)
asked = "Extract the person as JSON. Text: Ava Stone is a pilot and 25 years old."
assert extracting.run_sync(asked).output == Person(name="Ava Stone", age=25)

# Where the output is a tool's call, one is required in each answer.
calling = Agent(
    model,
    output_type=ToolOutput(Person),
    model_settings=ModelSettings(temperature=0, max_tokens=100, parallel_tool_calls=False),
    retries=0,
)
called = calling.run_sync(asked)
assert called.output.age == 25
[*_, answer, _] = called.all_messages()
[call] = answer.parts
assert (call.part_kind, call.tool_name) == ("tool-call", "final_result")
assert call.args_as_dict() == called.output.model_dump()
