"""What agents' conversations hold and some chat templates refuse, and what becomes of it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_metal.api.chat import REASONING_KEYS
from vllm_metal.engine.mlx.template_messages import Message, Messages, joined, text_of

_NAME = "probe"
_ID = "probe0001"  # Mistral's templates want nine letters.
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_ASKED: Message = {"role": "user", "content": "first probe"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {}}}],
}
_RESULT: Message = {"role": "tool", "content": "second probe", "tool_call_id": _ID}


class AgentTurns(NamedTuple):
    """Whether a template renders an answer with reasoning, text and calls, and a user's words behind the
    result of a call.
    """

    thinks_aloud: bool
    user_behind_result: bool

    def adapt(self, messages: Messages) -> Messages:
        """The messages with reasoning in the text that comes with calls, and the user's words in the result
        before them, where the template wants it so.
        """
        turns: list[Messages] = []  # Each of messages that become one.
        for message in messages:
            if not self.thinks_aloud:
                message = _thought_in_text(message)
            is_behind_result = message["role"] == "user" and bool(turns) and turns[-1][0]["role"] == "tool"
            if is_behind_result and not self.user_behind_result:
                turns[-1].append(message)
            else:
                turns.append([message])
        return [joined(turn) for turn in turns]


def _thought_in_text(message: Message) -> Message:
    thought = message.get(REASONING_KEYS[0])
    if not (message.get("tool_calls") and thought and (text := text_of(message))):
        return message
    others = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    return others | {"content": f"{thought}\n\n{text}"}


def detect(render: Callable[..., str]) -> AgentTurns:
    """Found by trying: `render` is the template."""

    def refuses(*messages: Message) -> bool:
        try:
            render([*messages], tools=[_TOOL], add_generation_prompt=True)
        except Exception:
            return True
        return False

    said = _CALL | {"content": "third probe"}
    thought = said | dict.fromkeys(REASONING_KEYS, "fourth probe")
    # A template may refuse all of it for other reasons.
    return AgentTurns(
        thinks_aloud=refuses(_ASKED, said, _RESULT) or not refuses(_ASKED, thought, _RESULT),
        user_behind_result=refuses(_ASKED, _CALL, _RESULT) or not refuses(_ASKED, _CALL, _RESULT, _ASKED),
    )
