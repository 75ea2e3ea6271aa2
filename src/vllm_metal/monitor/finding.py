"""What a check of `metal doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "skipped", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`why` it matters and the `hint` what to do go with warnings and problems.

    A check is "skipped" where it makes no sense, and then `message` says why.
    """

    level: Level
    subject: str
    message: str
    why: str | None = None
    hint: str | None = None
