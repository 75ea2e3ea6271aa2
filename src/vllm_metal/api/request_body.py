"""What every request body has in common. A null field is an absent one: `decoding.py`."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Meta, Struct

#: Lists of token ids: longer than any prompt, and short enough for the event loop.
NUM_TOKENS = Meta(max_length=1 << 20)


class RequestBody(Struct, kw_only=True):
    """`unsupported` names the fields that are known but not honoured yet. The values listed there ask for
    nothing, so they pass; any other is refused. Fields of `without_effect` change no answer and may hold
    anything. `successors` names what OpenAI has put in the place of old fields.
    """

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()
    successors: ClassVar[dict[str, str]] = {}

    model: str | None = None
