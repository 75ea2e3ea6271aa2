"""Says what the server does about a model while a command waits for it."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_metal.cli import printer
from vllm_metal.errors import MetalError

if TYPE_CHECKING:
    from vllm_metal.client import Client

_LOOK_EVERY_S = 0.5
_TO_LINE_START = "\r\x1b[K"


@contextmanager
def telling(client: Client, words: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> Iterator[None]:
    """Until the end of the block show what `words` makes of the status of the server's models.

    On a terminal that is a line that comes and goes, elsewhere a line each time that more than a percentage
    has changed. A server that does not tell its status is left in peace.
    """
    over = threading.Event()
    lock = threading.Lock()
    line = _TerminalLine() if sys.stderr.isatty() else _PlainLines()

    def watch() -> None:
        while not over.wait(_LOOK_EVERY_S):
            try:
                text = words(client.status()["models"])
            except MetalError:
                return
            with lock:
                if not over.is_set():
                    line.show(text)

    threading.Thread(target=watch, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        # Not joined: it may hang in a request.
        with lock:
            over.set()
            line.show(None)


def stage_of(name: str | None, models: Sequence[Mapping[str, Any]]) -> str | None:
    """How far the loading of `name` is, or without a name of the default model; None if it is not under way.

    A name that is not among the models may be an alias of any that is being loaded.
    """
    ours = [each for each in models if each["name"] == name] if name else models[:1]
    return next((each["stage"] for each in ours or models if each["status"] == "loading"), None)


class _TerminalLine:
    _shown = False

    def show(self, text: str | None) -> None:
        if text or self._shown:
            width = shutil.get_terminal_size().columns - 1
            printer.note(_TO_LINE_START + (text or "")[:width], end="")
        self._shown = bool(text)


class _PlainLines:
    _last = ""

    def show(self, text: str | None) -> None:
        text = re.sub(r" \(\d+ %\)$", "", text or "")
        if text and text != self._last:
            self._last = text
            printer.note(text)
