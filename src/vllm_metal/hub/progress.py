"""What a pull tells its caller while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PullProgress:
    """`stage` is in the user's words. `total_bytes` 0 means that this stage does not count bytes."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


OnProgress = Callable[[PullProgress], None]

#: Shows one pull from entering to leaving.
ShowProgress = Callable[[], AbstractContextManager[OnProgress]]


def silence() -> AbstractContextManager[OnProgress]:
    """Shows nothing."""
    return nullcontext(lambda _: None)
