"""What a pull tells its caller while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PullProgress:
    """`stage` is in the user's words. `total_bytes` 0 means that this stage does not count bytes."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


OnProgress = Callable[[PullProgress], None]
