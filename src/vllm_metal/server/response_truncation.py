"""Leaves out the oldest turns of a conversation that has outgrown the context, where a request wants that."""

from __future__ import annotations

from aiohttp import web

from vllm_metal.api.own_names import in_own_names
from vllm_metal.api.response_items import InputItem
from vllm_metal.api.responses import OWN_NAMES, ResponsesRequest
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.errors import PromptTooLong
from vllm_metal.server import chat_answers, generation
from vllm_metal.server.keys import MANAGER


async def truncated(request: web.Request, body: ResponsesRequest, items: list[InputItem]) -> list[InputItem]:
    """What comes before the first turn stays, and so does the last turn, whether it fits or not. Where turns
    have to go, so many do that the answer has room for `max_output_tokens`, or a quarter of the context.
    """
    turns = [i for i, item in enumerate(items) if item.role == "user"]
    if body.truncation == "disabled" or len(turns) < 2:
        return items
    deadline = generation.deadline(request, body)
    async with request.app[MANAGER].acquire(body.model, deadline=deadline) as engine:
        if await _fits(engine, request, body, items, room=1):
            return items
        quarter = engine.max_model_len // 4
        room = min(body.max_output_tokens or quarter, 2 * quarter)
        fewest, most = 1, len(turns) - 1
        while fewest < most:
            middle = (fewest + most) // 2
            if await _fits(engine, request, body, _without(items, turns, middle), room):
                most = middle
            else:
                fewest = middle + 1
    return _without(items, turns, fewest)


def _without(items: list[InputItem], turns: list[int], num_turns: int) -> list[InputItem]:
    return items[: turns[0]] + items[turns[num_turns] :]


async def _fits(
    engine: AsyncEngine, request: web.Request, body: ResponsesRequest, items: list[InputItem], room: int
) -> bool:
    chat = body.chat(items)
    try:
        with in_own_names(OWN_NAMES):
            messages, template_kwargs = chat_answers.template_inputs(request, chat)
            prompt = await engine.encode_chat(messages, **template_kwargs)
    except PromptTooLong:
        return False
    return len(prompt) + room <= engine.max_model_len
