"""Rows of text as columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As wide as its widest cells, without blanks at the ends of lines."""
    lines = [[_on_one_line(cell) for cell in line] for line in (header, *rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _on_one_line(text: str) -> str:
    """A name on disk may hold anything, and must not drive the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def _width(text: str) -> int:
    """In columns of a terminal, where half the world's letters take two, and accents none."""
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )
