"""What a pull tells its caller while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileProgress:
    name: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PullProgress:
    """`stage` is in the user's words, and names the model. `total_bytes` 0 means that it counts no bytes.

    `files` are those under way, where a stage has several.
    """

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0
    files: tuple[FileProgress, ...] = ()


OnProgress = Callable[[PullProgress], None]

#: Shows one pull from entering to leaving.
ShowProgress = Callable[[], AbstractContextManager[OnProgress]]


def silence() -> AbstractContextManager[OnProgress]:
    """Shows nothing."""
    return nullcontext(lambda _: None)
