"""OpenAI's agents against a model that writes what the last message says; argv: URL, how it writes a call."""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)

url, call = sys.argv[1:]
asked: list[str] = []


@function_tool
def get_weather(place: str) -> str:
    """Tells the weather."""
    asked.append(place)
    return "It is sunny."


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    agent = Agent(name="a", instructions="Be brief.", model="scripted", tools=[get_weather])

    result = await Runner.run(agent, call)
    assert (result.final_output, asked) == ("It is sunny.", ["Rome"])
    kinds = [item.type for item in result.new_items]
    assert kinds == ["reasoning_item", "tool_call_item", "tool_call_output_item", "message_output_item"], (
        kinds
    )

    again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Thanks."}])
    assert again.final_output == "Thanks."

    streaming = Runner.run_streamed(agent, call)
    text = ""
    async for event in streaming.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            text += event.data.delta
    assert (text, streaming.final_output, asked) == ("It is sunny.", "It is sunny.", ["Rome", "Rome"])

    kept = Agent(name="b", model="scripted", tools=[get_weather], model_settings=ModelSettings(store=True))
    first = await Runner.run(kept, call)
    second = await Runner.run(kept, "Bye.", previous_response_id=first.last_response_id)
    assert second.final_output == "Bye."


asyncio.run(main())
