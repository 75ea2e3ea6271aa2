"""POST /v1/responses, and what becomes of the responses that are kept."""

from __future__ import annotations

import secrets
from functools import partial

from aiohttp import web
from msgspec import structs

from vllm_metal.api.decoding import decode_query
from vllm_metal.api.own_names import in_own_names
from vllm_metal.api.response_items import InputItem, new_id
from vllm_metal.api.responses import (
    OWN_NAMES,
    DeletedResponse,
    ItemsQuery,
    Response,
    ResponseItemList,
    ResponseQuery,
    ResponsesRequest,
)
from vllm_metal.errors import InvalidRequest
from vllm_metal.server import bodies, chat_answers, security
from vllm_metal.server.keys import CONFIG, RESPONSES
from vllm_metal.server.response_store import KeptResponse
from vllm_metal.server.response_truncation import truncated
from vllm_metal.server.response_wording import ResponseWording


async def create(request: web.Request) -> web.StreamResponse:
    body = await bodies.read(request, ResponsesRequest)
    items = _conversation(request, body)

    def keep(response: Response) -> None:
        if body.store:
            request.app[RESPONSES].put(_owner(request), response, items)

    chat = body.chat(await truncated(request, body, items))
    wording = partial(ResponseWording, f"resp_{secrets.token_hex(24)}", body, keep)
    with in_own_names(OWN_NAMES):
        return await chat_answers.respond(request, chat, wording)


async def retrieve(request: web.Request) -> web.Response:
    if decode_query(request.query, ResponseQuery).stream:
        raise InvalidRequest(
            "only a response that is made in the background can be streamed again", param="stream"
        )
    return bodies.reply(_kept(request).response)


async def delete(request: web.Request) -> web.Response:
    response_id = request.match_info["response_id"]
    request.app[RESPONSES].delete(_owner(request), response_id)
    return bodies.reply(DeletedResponse(response_id))


async def cancel(request: web.Request) -> web.Response:
    """Raises InvalidRequest: whoever waits for a response cancels it by leaving."""
    _kept(request)
    raise InvalidRequest("only a response that is made in the background can be cancelled")


async def input_items(request: web.Request) -> web.Response:
    query = decode_query(request.query, ItemsQuery)
    items = list(_kept(request).input)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        items = _behind(query.after, items)
    shown = [item.resource() for item in items[: query.limit]]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else ("", "")
    return bodies.reply(ResponseItemList(shown, first_id, last_id, has_more=len(items) > query.limit))


def _behind(item_id: str, items: list[InputItem]) -> list[InputItem]:
    for i, item in enumerate(items):
        if item.id == item_id:
            return items[i + 1 :]
    raise InvalidRequest(f"there is no item `{item_id}` among these", param="after")


def _conversation(request: web.Request, body: ResponsesRequest) -> list[InputItem]:
    """All items before the answer, each with an id of its own. Raises InvalidRequest, ResponseNotFound."""
    store, owner = request.app[RESPONSES], _owner(request)
    items: list[InputItem] = []
    if body.previous_response_id is not None:
        kept = store.get(owner, body.previous_response_id, param="previous_response_id")
        items += (*kept.input, *kept.output)
    ids = {item.id for item in items}
    for i, item in enumerate(body.items()):
        if item.kind == "item_reference":
            item = store.item(owner, item.id or "", param=f"input[{i}].id")
        if not item.id or item.id in ids:
            item = structs.replace(item, id=new_id(item.kind))
        ids.add(item.id)
        items.append(item)
    return items


def _owner(request: web.Request) -> str:
    """Whose responses the request may see. Where no keys are asked for, one that is sent says nothing."""
    return security.api_key(request) if request.app[CONFIG].server.api_keys else ""


def _kept(request: web.Request) -> KeptResponse:
    return request.app[RESPONSES].get(_owner(request), request.match_info["response_id"])
