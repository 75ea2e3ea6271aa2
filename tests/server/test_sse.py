"""The event stream: what goes over the wire, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from msgspec import Struct

from vllm_metal.errors import EngineUnavailable
from vllm_metal.server import sse
from vllm_metal.server.sse import EventStream


class Word(Struct, tag_field="type", tag="word.said"):
    text: str


def stream(produce: Callable[[EventStream], Awaitable[None]], **how: Any) -> str:
    """The body that a client reads of what `produce` sends."""

    async def handler(request: web.Request) -> web.StreamResponse:
        async with EventStream(request, **how) as events:
            await produce(events)
        return events.response

    async def run() -> str:
        app = web.Application()
        app.router.add_get("/", handler)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            reader, writer = await asyncio.open_connection(*runner.addresses[0])
            # HTTP/1.0, so that the body comes without chunk marks.
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
            writer.close()
            await writer.wait_closed()
        finally:
            await runner.cleanup()
        assert "Content-Type: text/event-stream" in head
        return body

    return asyncio.run(run())


def test_events_then_done() -> None:
    async def produce(events: EventStream) -> None:
        await events.send({"a": 1}, {"b": "é\n"})
        await events.send()

    assert stream(produce) == 'data: {"a":1}\n\ndata: {"b":"é\\n"}\n\ndata: [DONE]\n\n'


def test_an_error_is_an_event() -> None:
    async def produce(events: EventStream) -> None:
        await events.send({"a": 1})
        raise EngineUnavailable("stopping")

    first, error, done, end = stream(produce).split("\n\n")
    assert first == 'data: {"a":1}'
    assert error.startswith('data: {"error":{"message":"stopping","type":"server_error"')
    assert (done, end) == ("data: [DONE]", "")


def test_named_events_go_by_their_tags() -> None:
    async def produce(events: EventStream) -> None:
        await events.send(Word("a"))
        raise EngineUnavailable("stopping")

    body = stream(produce, named=True, failure=lambda exc: [Word(exc.message)])
    said = 'event: word.said\ndata: {{"type":"word.said","text":"{}"}}\n\n'
    assert body == said.format("a") + said.format("stopping")


def test_a_fault_of_ours_is_an_event_that_tells_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async def produce(events: EventStream) -> None:
        raise ValueError("a secret")

    body = stream(produce)
    assert '"code":"internal_error"' in body
    assert "secret" not in body
    assert body.endswith("data: [DONE]\n\n")
    assert caplog.records[0].exc_info is not None


def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)

    async def produce(events: EventStream) -> None:
        for _ in range(3):
            await commented.acquire()
        await events.send(1)

    commented = asyncio.Semaphore(0)
    comment = EventStream.comment

    async def counted(events: EventStream, text: str) -> None:
        await comment(events, text)
        commented.release()

    monkeypatch.setattr(EventStream, "comment", counted)
    comments, event = stream(produce).removesuffix("data: [DONE]\n\n").split("data: ")
    assert set(comments.split("\n\n")) == {": keep-alive", ""}
    assert event == "1\n\n"


def test_no_comment_goes_out_while_events_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 2.0)

    async def produce(events: EventStream) -> None:
        for _ in range(25):
            await asyncio.sleep(0.1)
            await events.send(1)

    assert ": keep-alive" not in stream(produce)
