"""A streamed reply, and the whole one that its chunks amount to."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any


def chunks(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream that ends as it should, without `[DONE]`."""
    request = urllib.request.Request(
        url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.status == 200
        events = [
            line[len(b"data: ") :] for line in response.read().split(b"\n\n") if line.startswith(b"data: ")
        ]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


def named_events(
    url: str, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> list[Any]:
    """The events of a stream in which each goes by the name that is its `type`."""
    request = urllib.request.Request(
        url + path,
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.status == 200
        sent = response.read().decode().removesuffix("\n\n").split("\n\n")
    events = []
    for each in sent:
        if each.startswith(":"):  # a comment, of a server that had nothing else to send for a while
            continue
        name, _, data = each.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[Any]) -> list[dict[str, Any]]:
    """The choices by index: `text` or the content of a message, and what goes along with it."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for chunk in event["choices"]:
            choice = choices.setdefault(
                chunk["index"], {"text": "", "finish_reason": None, "logprobs": [], "token_ids": []}
            )
            assert choice["finish_reason"] is None, "a chunk after the last"
            choice["text"] += chunk["text"] if "text" in chunk else chunk["delta"].get("content") or ""
            choice["finish_reason"] = chunk["finish_reason"]
            choice["logprobs"] += entries(chunk["logprobs"])
            choice["token_ids"] += chunk.get("token_ids", [])
            if "prompt_token_ids" in chunk:
                assert "prompt_token_ids" not in choice, "told twice"
                choice["prompt_token_ids"] = chunk["prompt_token_ids"]
    return [choices[index] for index in sorted(choices)]


def entries(logprobs: Any) -> list[Any]:
    """A token each, of a chat or of a completion."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(
        zip(
            *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")),
            strict=True,
        )
    )
