"""Text that arrives in pieces, for parsers that read it as if it were all there.

A parser is a generator that yields whenever it needs more text, so where the pieces end cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

_NOT_IN_WORDS = frozenset("<>[](){}\"'`=,;:|")
_MAX_FIELD = 256


class Malformed(Exception):
    """The text is not what the grammar asks for, or ends too early."""


class Source:
    """`position` may be set back; over streamed text, which is else forgotten, only while `keep` is set."""

    def __init__(self) -> None:
        self.position = 0
        self.keep = False
        self.ended = False
        self._text = ""

    def feed(self, text: str) -> None:
        self._text += text

    def char(self) -> Steps[str]:
        """The next character, left unread; empty at the end."""
        while self.position == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.position]

    def take(self, size: int) -> Steps[str]:
        """The next `size` characters, fewer at the end."""
        while len(self._text) < self.position + size and not self.ended:
            yield
        taken = self._text[self.position : self.position + size]
        self.position += len(taken)
        return taken

    def accept(self, *options: str) -> Steps[str | None]:
        """Read the longest of the options that comes next."""
        longest = max(map(len, options))
        while True:
            ahead = self._text[self.position : self.position + longest]
            open_ends = any(len(ahead) < len(option) and option.startswith(ahead) for option in options)
            if self.ended or not open_ends:
                break
            yield
        matched = max((option for option in options if ahead.startswith(option)), key=len, default=None)
        self.position += len(matched or "")
        return matched

    def expect(self, literal: str) -> Steps[None]:
        """Read the literal, in which a space stands for any whitespace and a newline for one or none.

        Raises Malformed.
        """
        for part in re.split(r"([ \n])", literal):
            if part == " ":
                yield from self.whitespace()
            elif part == "\n":
                yield from self.accept("\n")
            elif part and not (yield from self.accept(part)):
                raise Malformed(part)

    def whitespace(self) -> Steps[str]:
        """Read whitespace up to what follows it."""
        begin = self.position
        while (yield from self.char()).isspace():
            self.position += 1
        return self._text[begin : self.position]

    def word(self) -> Steps[str]:
        """Read a name. Raises Malformed where there is none."""
        begin = self.position
        while (char := (yield from self.char())) and not char.isspace() and char not in _NOT_IN_WORDS:
            self.position += 1
            if self.position - begin > _MAX_FIELD:
                break
        word = self._text[begin : self.position]
        if not 0 < len(word) <= _MAX_FIELD:
            raise Malformed("a name")
        return word

    def field(self, closing: str) -> Steps[str]:
        """Read a short text within a line, up to `closing`, which is left unread. Raises Malformed."""
        begin = self.position
        while not (yield from self.accept(closing)):
            char = yield from self.take(1)
            if char in ("", "\n", "<") or self.position - begin > _MAX_FIELD:
                raise Malformed(closing)
        self.position -= len(closing)
        return self._text[begin : self.position]

    def stream_until(self, markers: Sequence[str], emit: Emit, *, trim: bool = False) -> Steps[str | None]:
        """Emit text as it comes, up to the first marker, which is returned and left unread.

        None at the end. With `trim`, whitespace before the marker is left unread as well.
        """
        sought = _Markers.of(tuple(markers))
        while True:
            found = sought.pattern.search(self._text, self.position) if markers else None
            safe = len(self._text) if self.ended else sought.undecided_from(self._text, self.position)
            # A marker that may yet turn out to be a longer one, or to overlap an earlier one, has to wait.
            if found and found.start() < safe:
                safe = found.start()
            else:
                found = None
            text = self._text[self.position : safe]
            if trim and (found or not self.ended):
                text = text.rstrip()
            if text:
                emit(text)
                self.position += len(text)
            if found:
                return found.group()
            if self.ended:
                return None
            if not self.keep:
                self._text = self._text[self.position :]
                self.position = 0
            yield


class _Markers:
    def __init__(self, markers: tuple[str, ...]) -> None:
        by_length = sorted(markers, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, by_length)))
        self._beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    @classmethod
    @cache
    def of(cls, markers: tuple[str, ...]) -> _Markers:
        return cls(markers)

    def undecided_from(self, text: str, position: int) -> int:
        """Where `text` ends in the beginning of a marker."""
        for begin in range(max(position, len(text) - self._longest), len(text)):
            if text[begin:] in self._beginnings:
                return begin
        return len(text)
