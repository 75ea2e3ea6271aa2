"""Which responses are kept, how many, for how long and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_metal.api.response_items import InputItem, OutputMessage, OutputText
from vllm_metal.api.responses import ReasoningOptions, Response, TextOptions
from vllm_metal.errors import ResponseNotFound
from vllm_metal.server.response_store import ResponseStore


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def response(response_id: str, text: str = "Hi") -> Response:
    unsaid: dict[str, Any] = dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id"))
    return Response(
        id=response_id,
        created_at=1,
        model="m",
        status="completed",
        output=[OutputMessage(f"msg_{response_id}", [OutputText(text)], "completed")],
        temperature=1.0,
        top_p=1.0,
        metadata={},
        parallel_tool_calls=True,
        reasoning=ReasoningOptions(),
        store=True,
        text=TextOptions(),
        tool_choice="auto",
        tools=[],
        truncation="disabled",
        top_logprobs=0,
        **unsaid,
    )


def kept(store: ResponseStore, *ids: str, owner: str = "me") -> list[str]:
    """Those of `ids` that are kept; what is in them is as well, or else is not."""
    found = []
    for each in ids:
        try:
            found.append(store.get(owner, each).response.id)
        except ResponseNotFound:
            with pytest.raises(ResponseNotFound):
                store.item(owner, f"msg_{each}", param="input")
        else:
            assert store.item(owner, f"msg_{each}", param="input").text
    return found


def test_the_oldest_go_for_new_ones() -> None:
    store = ResponseStore(max_count=2)
    for each in ("a", "b", "c"):
        store.put("me", response(each), [])
    assert kept(store, "a", "b", "c") == ["b", "c"]


def test_all_together_are_no_larger_than_allowed() -> None:
    store = ResponseStore(max_bytes=10_000)
    for each in ("a", "b", "c"):
        store.put("me", response(each, "x" * 4000), [])
    assert kept(store, "a", "b", "c") == ["b", "c"]
    store.put("me", response("huge"), [InputItem(role="user", content="x" * 10_000)])
    assert kept(store, "b", "c", "huge") == ["b", "c"]


def test_what_has_gone_leaves_its_room() -> None:
    store = ResponseStore(max_bytes=10_000)
    for _ in range(100):
        store.put("me", response("a", "x" * 4000), [])
        store.delete("me", "a")
    for each in ("b", "c"):
        store.put("me", response(each, "x" * 4000), [])
    assert kept(store, "a", "b", "c") == ["b", "c"]


def test_each_has_its_day() -> None:
    clock = Clock()
    store = ResponseStore(life_s=10, now=clock)
    store.put("me", response("a"), [])
    clock.now_s = 9
    store.put("me", response("b"), [])
    assert kept(store, "a", "b") == ["a", "b"]
    clock.now_s = 10
    assert kept(store, "a", "b") == ["b"]


def test_nobody_else_is_told() -> None:
    store = ResponseStore()
    store.put("me", response("a"), [])
    assert kept(store, "a", owner="you") == []
    with pytest.raises(ResponseNotFound):
        store.delete("you", "a")
    assert kept(store, "a") == ["a"]
