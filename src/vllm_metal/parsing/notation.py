"""How formats write values down: JSON and its relatives, transcribed to JSON piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_metal.parsing.source import Emit, Malformed, Source, Steps

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_IN_SCALARS = frozenset("+-._")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Notation:
    """`escapes` says, by the character after the backslash, what it stands for or its number of hex digits;
    without escapes a backslash is itself.
    """

    quotes: tuple[str, ...]
    words: Mapping[str, str]
    escapes: Mapping[str, str | int] | None = None
    bare_keys: bool = False


_JSON_WORDS = {word: word for word in ("true", "false", "null")}
_JSON_ESCAPES: dict[str, str | int] = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "u": 4,
}  # fmt: skip

JSON = Notation(quotes=('"',), words=_JSON_WORDS, escapes=_JSON_ESCAPES)
PYTHON = Notation(
    quotes=('"""', "'''", '"', "'"),
    words=_JSON_WORDS | {"True": "true", "False": "false", "None": "null"},
    escapes={key: to for key, to in _JSON_ESCAPES.items() if key != "/"}
    | {"'": "'", "\n": "", "a": "\a", "v": "\v", "0": "\0", "x": 2, "U": 8},
)
GEMMA = Notation(quotes=('<|"|>', "<escape>"), words=_JSON_WORDS, bare_keys=True)


def escape(text: str) -> str:
    """Text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def transcribe(source: Source, notation: Notation, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read one value and emit it as JSON. Raises Malformed, after what was right has been emitted."""
    if depth > _MAX_DEPTH:
        raise Malformed("a value of less depth")
    if quote := (yield from source.accept(*notation.quotes)):
        yield from _string(source, notation, quote, emit)
    elif opening := (yield from source.accept("{", "[")):
        yield from _container(source, notation, opening, emit, depth)
    else:
        yield from _scalar(source, notation, emit)


def read(source: Source, notation: Notation) -> Steps[Any]:
    """Read one value. Raises Malformed."""
    pieces: list[str] = []
    yield from transcribe(source, notation, pieces.append)
    return json.loads("".join(pieces))


def parse(text: str, notation: Notation) -> Any:
    """The value that is all of `text`. Raises Malformed."""
    source = Source()
    source.feed(text)
    source.ended = True
    steps = read(source, notation)
    try:
        next(steps)
    except StopIteration as done:
        if source.position == len(text):
            return done.value
    raise Malformed("the end")


def _container(source: Source, notation: Notation, opening: str, emit: Emit, depth: int) -> Steps[None]:
    closing = {"{": "}", "[": "]"}[opening]
    emit(opening)
    emit((yield from source.whitespace()))
    if (yield from source.accept(closing)):
        emit(closing)
        return
    while True:
        if opening == "{":
            yield from _key(source, notation, emit)
        yield from transcribe(source, notation, emit, depth + 1)
        emit((yield from source.whitespace()))
        mark = yield from source.accept(",", closing)
        if mark is None:
            raise Malformed(closing)
        emit(mark)
        if mark == closing:
            return
        emit((yield from source.whitespace()))


def _key(source: Source, notation: Notation, emit: Emit) -> Steps[None]:
    if quote := (yield from source.accept(*notation.quotes)):
        yield from _string(source, notation, quote, emit)
    elif notation.bare_keys:
        emit(json.dumps((yield from source.field(":")).strip(), ensure_ascii=False))
    else:
        raise Malformed("a key")
    emit((yield from source.whitespace()))
    if not (yield from source.accept(":")):
        raise Malformed(":")
    emit(":")
    emit((yield from source.whitespace()))


def _string(source: Source, notation: Notation, quote: str, emit: Emit) -> Steps[None]:
    emit('"')
    markers = (quote,) if notation.escapes is None else (quote, "\\")
    while True:
        # Raw control characters, which models often write, are mended on the way.
        marker = yield from source.stream_until(markers, lambda text: emit(escape(text)))
        if marker is None:
            raise Malformed(quote)
        source.position += len(marker)
        if marker == quote:
            emit('"')
            return
        assert notation.escapes is not None
        emit((yield from _escaped(source, notation.escapes)))


def _escaped(source: Source, escapes: Mapping[str, str | int]) -> Steps[str]:
    """What follows a backslash, as JSON; an escape that the notation does not know stands for itself."""
    char = yield from source.take(1)
    if not char:
        raise Malformed("an escape")
    meaning = escapes.get(char)
    if isinstance(meaning, str):
        return escape(meaning)
    if meaning is None:
        return escape("\\" + char)
    digits = yield from source.take(meaning)
    if len(digits) < meaning and source.ended:
        raise Malformed("an escape")
    if not re.fullmatch(r"[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
        return escape("\\" + char + digits)
    code = int(digits, 16)
    # Half a surrogate pair stays an escape: its other half follows.
    return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else escape(chr(code))


def _scalar(source: Source, notation: Notation, emit: Emit) -> Steps[None]:
    scalar = ""
    while (char := (yield from source.char())).isalnum() or (char and char in _IN_SCALARS):
        scalar += yield from source.take(1)
        if len(scalar) > 512:
            break
    if scalar in notation.words:
        emit(notation.words[scalar])
    elif _NUMBER.fullmatch(scalar):
        emit(scalar)
    else:
        source.position -= len(scalar)
        raise Malformed("a value")
