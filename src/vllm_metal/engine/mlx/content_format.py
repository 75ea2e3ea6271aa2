"""How a chat template wants the content of a message: as text, or as a list of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_metal.engine.mlx.template_messages import Messages

_PROBES = ("first probe", "second probe")


class ContentFormat(NamedTuple):
    """What a template renders rightly."""

    text: bool
    parts: bool

    def adapt(self, messages: Messages) -> Messages:
        """The messages with every content in a form that the template takes, its own where it can be."""
        return [message | {"content": self._adapted(message.get("content"))} for message in messages]

    def _adapted(self, content: Any) -> Any:
        if isinstance(content, list) and not self.parts:
            return "\n".join(part["text"] for part in content)
        if isinstance(content, str) and self.parts and not self.text:
            return [{"type": "text", "text": content}]
        return content


def detect(render: Callable[[Messages], str]) -> ContentFormat:
    """Found by trying: `render` is the template."""

    def renders(content: object, *wanted: str) -> str | None:
        try:
            text = render([{"role": "user", "content": content}])
        except Exception:
            return None
        return text if all(each in text for each in wanted) else None

    parts = renders([{"type": "text", "text": probe} for probe in _PROBES], *_PROBES)
    return ContentFormat(
        text=renders(_PROBES[0], _PROBES[0]) is not None,
        # A list that is printed as it is shows its keys.
        parts=parts is not None and "'type'" not in parts and '"type"' not in parts,
    )
