"""The literal text in which formats mark what is what."""

from __future__ import annotations

import re

_SPECIAL_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


def first_mark(literal: str) -> str:
    """The first part of a literal that is not optional whitespace."""
    return literal.strip().split(" ")[0].split("\n")[0]


def special_tokens(*texts: str) -> frozenset[str]:
    """All that may be a special token in some vocabulary."""
    return frozenset(token for text in texts for token in _SPECIAL_TOKEN.findall(text))
