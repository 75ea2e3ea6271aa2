"""How a family of models writes tool calls down."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from vllm_metal.parsing.marks import first_mark, special_tokens
from vllm_metal.parsing.notation import JSON, Notation

Fields = Mapping[str, str]


def new_call_id(_: Fields) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class Pattern:
    """Literal text with fields, such as `<function={name}>{parameters}</function>`.

    In literals a space stands for any whitespace, a newline for one or none.
    """

    text: str

    @cached_property
    def pieces(self) -> list[tuple[str, str, str]]:
        """Each field with the literals before and after it."""
        fields = self._split[1::2]
        return list(zip(self.literals, fields, self.literals[1:], strict=False))

    @property
    def literals(self) -> tuple[str, ...]:
        return self._split[::2]

    @property
    def prefix(self) -> str:
        """What text must hold for the pattern to begin there."""
        return first_mark(self.literals[0])

    @property
    def tail(self) -> str:
        return self.literals[-1]

    @cached_property
    def _split(self) -> tuple[str, ...]:
        return tuple(re.split(r"\{(\w+)\}", self.text))


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Calls stand between `begin` and `end`, alone, one after another or in a JSON list.

    Each of `calls` is a pattern that a call may follow, tried in order. Its last field holds the arguments:
    `{arguments}` an object in `notation`, `{parameters}` one `parameter` after another, `{keywords}` as in
    Python; or `{object}`, JSON with both name and arguments. Of the fields before it `{name}` is the
    function's, `{id}` the call's. Of a parameter's, `{string}` (true or false) and `{type}` overrule the
    schema. A call that is whole needs none of the marks that would close it.

    A model writes an `{object}` as `object`, and calls in a JSON list if `in_list`. Unless it writes
    `several`, the call ends the answer.
    """

    name: str
    calls: tuple[Pattern, ...]
    begin: str = ""
    end: str = ""
    parameter: Pattern = Pattern("")
    object: Pattern = Pattern('{ "name" : "{name}" , "arguments" : {arguments} }')
    in_list: bool = False
    several: bool = True
    notation: Notation = JSON
    #: What may stand round the text of a parameter that is not to be mistaken for a tag.
    text_quotes: tuple[str, str] | None = None
    #: A call may also be all there is to mark it, at the start of an answer.
    unmarked: bool = False
    call_id: Callable[[Fields], str] = new_call_id

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """Text at which calls can begin."""
        return tuple(filter(None, dict.fromkeys((self.begin, *(call.prefix for call in self.calls)))))

    @property
    def marks(self) -> set[str]:
        """All literal text of the format that is long enough to tell something."""
        literals = (self.begin, self.end, *self.parameter.literals)
        for call in self.calls:
            literals += call.literals
        return {part for literal in literals for part in literal.split() if len(part) > 2}

    @property
    def visible_tokens(self) -> frozenset[str]:
        """The marks that may be special tokens of a model, which the parser has to see."""
        return special_tokens(*self.marks, *self.notation.quotes)
