"""What an answer must follow, as it was asked for. Nothing is compiled here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: How `Grammar.source` is to be read. A JSON Schema; a regular expression that the whole answer matches; a
#: JSON list of all answers; GBNF or Lark; free text in which tags, once begun, follow schemas; Lark as it is.
Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """`param` is the field that asked for it, for errors.

    `prefix` is Lark for what may come before it, such as a model's reasoning: the answer is free to be that
    first, and follows `source` from there on.
    """

    kind: Kind
    source: str
    prefix: str = ""
    param: str = field(default="structured_outputs", compare=False)
