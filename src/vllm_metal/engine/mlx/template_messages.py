"""Messages as chat templates take them."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
Messages = list[Message]


def text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)


def joined(turn: Messages) -> Message:
    """The first of them, with all that they say."""
    if len(turn) == 1:
        return turn[0]
    return turn[0] | {"content": "\n\n".join(map(text_of, turn))}
