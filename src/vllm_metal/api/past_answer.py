"""An answer that a client brings back in pieces, put together again."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_metal.api.chat import ChatMessage, ToolCall


@dataclass(slots=True)
class PastAnswer:
    """All that the model wrote in one turn. The texts are what it said before a call and behind it."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant", "".join(self.texts), reasoning="".join(self.thoughts), tool_calls=self.calls
        )
