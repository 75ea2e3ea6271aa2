"""A chat template that came with a request: a stranger's program, so it runs where it can be given up on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vllm_metal.errors import InvalidRequest

_PROGRAM = Path(__file__).with_name("render_request_template.py")
#: For a machine so busy that the limit of CPU time is not reached.
_WAIT_S = 20.0
_MAX_MEMORY_BYTES = 1 << 30
_WATCH_S = 0.05


def render(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The text; a second of work for another process. Raises InvalidRequest, naming `chat_template`."""
    asked = json.dumps({"messages": messages, "options": {**variables, "chat_template": template}})
    answer = _ask(asked.encode())
    if "error" in answer:
        raise InvalidRequest(f"the request's chat template failed: {answer['error']}", param="chat_template")
    text: str = answer["text"]
    return text


def _ask(asked: bytes) -> dict[str, Any]:
    give_up_at = time.monotonic() + _WAIT_S
    to_send: bytes | None = asked
    with subprocess.Popen(
        [sys.executable, "-I", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(to_send, timeout=_WATCH_S)
                    break
                except subprocess.TimeoutExpired:
                    to_send = None  # The first call goes on sending it.
                    if time.monotonic() > give_up_at or _memory_bytes(process.pid) > _MAX_MEMORY_BYTES:
                        break
        finally:
            process.kill()
    if process.returncode != 0:
        raise InvalidRequest(
            "the request's chat template takes too long or too much memory", param="chat_template"
        )
    answer: dict[str, Any] = json.loads(output)
    return answer


def _memory_bytes(pid: int) -> int:
    # macOS has no limit that the process could set itself.
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
