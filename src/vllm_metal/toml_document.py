"""TOML text that knows where each key stands, so that one value can be changed and all else kept as it is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_BOM = "\ufeff"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TO_ESCAPE = re.compile(r'[\x00-\x1f"\\\x7f]')
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_TOKEN = re.compile(
    r'''
      (?P<space>   [ \t\ufeff]+ )
    | (?P<newline> \r?\n )
    | (?P<comment> \#[^\r\n]* )
    | (?P<string>  """(?:\\.|[^\\])*?""""{0,2} | \'\'\'.*?\'\'\'\'{0,2} | "(?:\\.|[^"\\])*" | '[^']*' )
    | (?P<open>    [\[{] )
    | (?P<close>   [\]}] )
    | (?P<equals>  = )
    | (?P<mark>    [.,] )
    | (?P<bare>    [^\s#"'\[\]{},=.]+ )
    ''',
    re.VERBOSE | re.DOTALL,
)


def render(value: object) -> str:
    """`value` as TOML on one line: a string, a number, a boolean, or a list or table of them.

    Anything else that a TOML file can hold comes out as a message may show it.
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(render, value))}]"
    if isinstance(value, dict):
        entries = ", ".join(f"{_key(str(key))} = {render(item)}" for key, item in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{_TO_ESCAPE.sub(_escape, value)}"'
    return str(value)


def dotted(path: Iterable[str]) -> str:
    """`path` as a TOML key, its parts quoted where they have to be."""
    return ".".join(map(_key, path))


def undotted(key: str) -> tuple[str, ...]:
    """The path that `dotted` made a key of. Raises `ValueError` for what is no key."""
    table, path = tomllib.loads(f"[{key}]"), []
    while table:
        [(name, table)] = table.items()
        path.append(name)
    return tuple(path)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else render(name)


def _escape(character: re.Match[str]) -> str:
    return _ESCAPES.get(character.group()) or f"\\u{ord(character.group()):04x}"


@dataclass(frozen=True, slots=True)
class _Statement:
    """A header, a `key = value` in `table`, or a comment alone on its line (which has no path).

    `start`, `value_start` and `end` are offsets into the text.
    """

    path: tuple[str, ...]
    table: tuple[str, ...]
    is_header: bool
    start: int
    value_start: int
    end: int
    inner_comments: tuple[str, ...]

    def is_within(self, table: tuple[str, ...]) -> bool:
        """Whether it sets a key of `table` from outside, by a dotted name."""
        return len(self.table) < len(table) < len(self.path) and self.path[: len(table)] == table


class TomlDocument:
    """Raises `tomllib.TOMLDecodeError`, or another `ValueError` for a number beyond Python's limits."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = tomllib.loads(text.removeprefix(_BOM))
        self._statements = tuple(_statements(text))

    def line_of(self, *path: str) -> int | None:
        """The line, from 1, where the table or key `path` is first written, or else what holds it."""
        while path:
            for statement in self._statements:
                if statement.path[: len(path)] == path:
                    return self.text.count("\n", 0, statement.start) + 1
            path = path[:-1]
        return None

    def with_value(self, table: tuple[str, ...], key: str, value: object, *, default: object) -> str:
        """The text with `value` at `table.key`; a new key takes the place of a comment `# key = default`.

        Raises `ValueError` where that key alone cannot be changed, as inside an inline table.
        """
        value = list(value) if isinstance(value, tuple) else value
        before = tomllib.loads(self.text.removeprefix(_BOM))
        _table_of(before, table).pop(key, None)
        text = self._text_with_value(table, key, value, default)
        after = tomllib.loads(text.removeprefix(_BOM))
        written = _table_of(after, table).pop(key, None)
        # Compared as written: to `==`, 1 is True and nan is not nan.
        if repr((written, after)) != repr((value, before)):
            raise ValueError("the result would differ in more than that key")
        return text

    def _text_with_value(self, table: tuple[str, ...], key: str, value: object, default: object) -> str:
        entry, path = f"{dotted([key])} = {render(value)}", (*table, key)
        for statement in self._statements:
            if statement.path[: len(path)] == path:
                if statement.is_header or statement.path != path:
                    raise ValueError(f"`{dotted(path)}` is a section")
                return self._replaced(statement, value)
        if body := self._body_of(table):
            for statement in body:
                if not statement.path and (line := self._uncommented(statement, key, default)):
                    active = line._replaced(line._statements[0], value)
                    return self.text[: statement.start] + active + self.text[statement.end :]
            return self._inserted(entry, after=[each for each in body if each.path][-1])
        outside = [each for each in self._statements if each.is_within(table)]
        if outside:
            prefix = dotted(table[len(outside[-1].table) :])
            return self._inserted(f"{prefix}.{entry}", after=outside[-1])
        for statement in self._statements:
            if statement.path and not statement.is_header and statement.path == table[: len(statement.path)]:
                raise ValueError(f"`{dotted(statement.path)}` is a value on one line")
        return self._appended(f"[{dotted(table)}]", entry)

    def _body_of(self, table: tuple[str, ...]) -> list[_Statement]:
        """The table's header and all up to the next one."""
        body: list[_Statement] = []
        for statement in self._statements:
            if statement.is_header and body:
                break
            if body or (statement.is_header and statement.path == table):
                body.append(statement)
        return body

    def _uncommented(self, comment: _Statement, key: str, default: object) -> TomlDocument | None:
        """What the comment says, if that is `key = default`."""
        try:
            document = TomlDocument(self.text[comment.start : comment.end].lstrip("#").strip())
        except (ValueError, RecursionError):
            return None
        says_default = list(document.data) == [key] and render(document.data[key]) == render(default)
        return document if says_default else None

    def _replaced(self, statement: _Statement, value: object) -> str:
        """Comments between the items of the old value move to lines of their own above it."""
        line_break = self._newline + self._indent(statement)
        moved = "".join(comment + line_break for comment in statement.inner_comments)
        name = self.text[statement.start : statement.value_start]
        return f"{self.text[: statement.start]}{moved}{name}{render(value)}{self.text[statement.end :]}"

    def _inserted(self, entry: str, *, after: _Statement) -> str:
        line_end = self.text.find("\n", after.end) + 1
        indent = "" if after.is_header else self._indent(after)
        if not line_end:
            return f"{self.text}{self._newline}{indent}{entry}{self._newline}"
        return f"{self.text[:line_end]}{indent}{entry}{self._newline}{self.text[line_end:]}"

    def _appended(self, *lines: str) -> str:
        ended = not self.text.removeprefix(_BOM) or self.text.endswith("\n")
        gap = ("" if ended else self._newline) + (self._newline if self._statements else "")
        return self.text + gap + "".join(line + self._newline for line in lines)

    def _indent(self, statement: _Statement) -> str:
        line_start = self.text.rfind("\n", 0, statement.start) + 1
        return self.text[line_start : statement.start].removeprefix(_BOM)

    @property
    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"


def _table_of(data: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    """The table at `path`, put there if it is not. Raises `ValueError` where something else is."""
    for name in path:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ValueError(f"`{name}` is not a section")
    return data


def _statements(text: str) -> Iterator[_Statement]:
    """`text` is valid TOML, so brackets and strings are known to close."""
    table: tuple[str, ...] = ()
    for tokens in _logical_lines(text):
        code = [token for token in tokens if token.lastgroup != "comment"]
        if not code:
            yield _Statement((), table, False, tokens[0].start(), tokens[0].start(), tokens[0].end(), ())
            continue
        start, end = code[0].start(), code[-1].end()
        if code[0].lastgroup == "open":
            table = _path(code)
            yield _Statement(table, table, True, start, end, end, ())
            continue
        equals = next(place for place, token in enumerate(code) if token.lastgroup == "equals")
        comments = [token.group() for token in tokens if token.lastgroup == "comment" and token.start() < end]
        path = table + _path(code[:equals])
        yield _Statement(path, table, False, start, code[equals + 1].start(), end, tuple(comments))


def _logical_lines(text: str) -> Iterator[list[re.Match[str]]]:
    """The tokens of each line that has any; a value in brackets may span several lines of text."""
    line: list[re.Match[str]] = []
    depth = 0
    for token in _TOKEN.finditer(text):
        match token.lastgroup:
            case "newline":
                if not depth and line:
                    yield line
                    line = []
                continue
            case "space":
                continue
            case "open":
                depth += 1
            case "close":
                depth -= 1
        line.append(token)
    if line:
        yield line


def _path(tokens: list[re.Match[str]]) -> tuple[str, ...]:
    return tuple(
        token.group() if token.lastgroup == "bare" else tomllib.loads(f"key = {token.group()}")["key"]
        for token in tokens
        if token.lastgroup in ("bare", "string")
    )
