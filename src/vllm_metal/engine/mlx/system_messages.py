"""Where a chat template takes messages of role `system`, and what becomes of them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_metal.engine.mlx.template_messages import Messages, joined, text_of

_PROBES = tuple(f"{number} probe" for number in ("first", "second", "third", "fourth", "fifth"))


class SystemMessages(NamedTuple):
    """Whether a template renders them where they are: before all others, and behind some."""

    first: bool
    later: bool

    def adapt(self, messages: Messages) -> Messages:
        """The messages with what the template would refuse or move said by the user, in its place: all before
        it stays as it was, and so does what is kept of it.
        """
        if self.first and self.later:
            return messages
        turns: list[Messages] = []  # Each of messages that become one.
        is_said = False  # Whether the last of them holds what a system message says.
        for message in messages:
            is_leading = not turns or (len(turns) == 1 and turns[0][0]["role"] == "system")
            becomes_said = message["role"] == "system" and not (self.first if is_leading else self.later)
            if becomes_said:
                message = {"role": "user", "content": f"<system>\n{text_of(message)}\n</system>"}
            # Templates that know no second system message often want user and assistant to alternate.
            joins = (
                bool(turns)
                and turns[-1][0]["role"] == message["role"]
                and (is_leading or is_said or becomes_said)
            )
            if joins:
                turns[-1].append(message)
            else:
                turns.append([message])
            is_said = becomes_said or (joins and is_said)
        return [joined(turn) for turn in turns]


def detect(render: Callable[[Messages], str]) -> SystemMessages:
    """Found by trying: `render` is the template."""

    def renders(*roles: str) -> bool:
        probes = _PROBES[: len(roles)]
        try:
            text = render(
                [{"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)]
            )
        except Exception:
            return False
        places = [text.find(probe) for probe in probes]
        return min(places) >= 0 and places == sorted(places)

    return SystemMessages(
        first=renders("system", "user"),
        later=renders("user", "system", "assistant", "user", "system"),
    )
