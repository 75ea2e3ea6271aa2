"""The measuring client against a scripted server, cut anywhere."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripted_server import DEADLINE_S, Script, chunk, event, refuses, replies, serving, streams, streams_raw
from vllm_metal.bench.client import StreamingClient, Target
from vllm_metal.bench.events import EventParser
from vllm_metal.bench.load import Load, Prompt
from vllm_metal.bench.record import RequestRecord
from vllm_metal.bench.run import run, warm_up

PROMPT = Prompt(shared="", text="Hello", max_tokens=8)


@pytest.fixture
def server():
    with serving() as script:
        yield script


def ask(target: Target, prompt: Prompt = PROMPT) -> RequestRecord:
    async def main() -> RequestRecord:
        record = RequestRecord(prompt.max_tokens)
        async with StreamingClient(target) as client:
            await client.stream(prompt, record)
        return record

    return asyncio.run(main())


@given(st.lists(st.dictionaries(st.text(), st.text())), st.sampled_from(["\n\n", "\r\n\r\n"]), st.data())
def test_events_come_out_whole_wherever_the_stream_is_cut(bodies: list, end: str, data: st.DataObject):
    stream = "".join(
        f": keep-alive{end}event: message\ndata: {json.dumps(body, ensure_ascii=False)}{end}"
        for body in bodies
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    parser, events = EventParser(), []
    for begin, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += parser.feed(stream[begin:stop])
    assert [json.loads(each) for each in events] == bodies


def test_a_streamed_chat_is_timed_and_counted(server: Script):
    server.on_chat(streams("a", "b", "c", prompt_tokens=5))
    record = ask(Target(url=server.url, model="m", api_key="sesame", sampling={"temperature": 0}))
    assert record.error is None
    assert (record.prompt_tokens, record.completion_tokens, len(record.arrivals_s)) == (5, 3, 3)
    assert record.started_s < record.arrivals_s[0] <= record.arrivals_s[-1] <= record.finished_s
    received = server.next_chat()
    assert received.headers["Authorization"] == "Bearer sesame"
    assert received.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_completions_take_the_shared_prefix_in_the_prompt(server: Script):
    text = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    server.on("/v1/completions", streams_raw(event(text)))
    record = ask(Target(url=server.url, endpoint_type="completions"), Prompt("be good", "Hello", 1))
    assert record.error is None
    assert (len(record.arrivals_s), record.completion_tokens) == (1, None)
    body = server.received.get(timeout=DEADLINE_S).body
    assert body["prompt"] == "be good Hello"
    assert "model" not in body


def test_a_chat_takes_the_shared_prefix_as_its_system_message(server: Script):
    server.on_chat(streams("a"))
    ask(Target(url=server.url), Prompt("be good", "Hello", 1))
    assert server.next_chat().body["messages"][0] == {"role": "system", "content": "be good"}


def test_reasoning_counts_as_text(server: Script):
    server.on_chat(
        streams_raw(event(chunk(reasoning="hm")), event(chunk("a")), event(chunk(finish_reason="stop")))
    )
    assert len(ask(Target(url=server.url)).arrivals_s) == 2


BROKEN_OFF = "the server broke off before its answer was complete"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refuses(429, "too many requests"), "too many requests"),
        (replies({"error": "no such\nmodel"}, 404), "no such model"),
        (replies("<html>", 502), "the server answered 502"),
        (streams_raw(event(chunk("a")), event({"error": {"message": "out of memory"}})), "out of memory"),
        (streams_raw(event(chunk("a"))), BROKEN_OFF),
        (streams_raw(b"data: [DONE]\n\n"), BROKEN_OFF),
        (streams_raw(b"data: {\n\n"), "the server sent something other than OpenAI's chunks"),
        (streams_raw(b"data: []\n\n"), "the server sent something other than OpenAI's chunks"),
    ],
)
def test_what_goes_wrong_is_kept_in_the_servers_words(server: Script, answer, error: str):
    server.on_chat(answer)
    record = ask(Target(url=server.url))
    assert record.error == error
    assert record.finished_s > record.started_s


def test_a_connection_cut_off_is_an_error_too(server: Script):
    server.on_chat(streams_raw(event(chunk("a")), complete=False))
    assert ask(Target(url=server.url)).error.startswith("the connection failed: ")


def test_a_unix_socket(tmp_path):
    with serving(socket=tmp_path / "s") as script:
        script.on_chat(streams("a"))
        assert ask(Target(url=script.url)).error is None


def test_concurrency_is_bounded_in_warmup_and_run(server: Script):
    lock, under_way, most = threading.Lock(), 0, 0
    full = threading.Barrier(3)

    def answer(handler) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        full.wait(DEADLINE_S)  # all three slots must be taken before any answers
        with lock:
            under_way -= 1
        streams("a")(handler)

    server.on_chat(answer)
    load = Load(num_prompts=9, input_words=(2,), output_len=(1,), max_concurrency=3, warmup=3)
    target = Target(url=server.url)
    records: list[RequestRecord] = []
    asyncio.run(warm_up(load, target))
    assert server.received.qsize() == 3
    asyncio.run(run(load, target, records))
    assert [record.error for record in records] == [None] * 9
    assert most == 3
    assert server.received.qsize() == 12
