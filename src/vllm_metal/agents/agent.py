"""What an agent is, what it is pointed at, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: None takes a variable away.
Variables = Mapping[str, str | None]

#: What most agents would ask for, of whatever model.
_LONGEST_ANSWER = 32_000


@dataclass(frozen=True, slots=True)
class Target:
    """A model, and the server that has it at `url`. `max_model_len` counts tokens of prompt and answer."""

    url: str
    model: str
    api_key: str | None = None
    max_model_len: int | None = None

    @property
    def base_url(self) -> str:
        """Where OpenAI's API begins."""
        return f"{self.url}/v1"

    @property
    def key(self) -> str:
        """Agents want one, even where the server does not."""
        return self.api_key or "none"

    @property
    def max_answer_len(self) -> int | None:
        """What an agent may keep free for an answer and still have room for its work."""
        return self.max_model_len and min(self.max_model_len // 4, _LONGEST_ANSWER)


@dataclass(frozen=True, slots=True)
class Start:
    """One run: arguments that go before the user's, variables, and files to write first."""

    arguments: tuple[str, ...] = ()
    variables: Variables = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user's own settings `file` of an agent has to say, for it to come here by itself.

    A file that is new begins with `heading`.
    """

    file: Path
    entries: Mapping[str, Any]
    heading: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    """`install` is the command that installs `program`.

    `start` gets a folder for the files of that one run. `settings` is None for an agent whose file another
    program should not write.
    """

    name: str
    program: str
    install: str
    start: Callable[[Target, Path], Start]
    settings: Callable[[Target], Settings] | None = None
