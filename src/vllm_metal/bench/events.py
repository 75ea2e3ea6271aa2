"""Cuts a byte stream of server-sent events into their data, at the least cost."""

from __future__ import annotations


class EventParser:
    """OpenAI's servers write each event as one `data:` line; all other lines are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that `received` completes, wherever it was cut."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
