"""One setting: what it may be, how it is read from text, and how it is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vllm_metal import paths
from vllm_metal.errors import ConfigError
from vllm_metal.toml_document import dotted, render

T = TypeVar("T")


def setting(default: T, doc: str, *, kind: type | None = None, **known: Any) -> T:
    """A dataclass field that carries the rest of its `Setting`; `known` are fields of that."""
    metadata = {"doc": doc, "kind": kind or type(default), **known}
    # A dataclass takes no dictionary for a default.
    given: dict[str, Any] = (
        {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    )
    declared: T = field(**given, repr=not known.get("secret"), metadata=metadata)
    return declared


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one key of one section, beside its value."""

    section: str
    name: str
    default: object
    doc: str
    kind: type
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    or_zero: bool = False
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    required: bool = False
    secret: bool = False
    is_path: bool = False
    flag: str = ""
    variables: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    """Names that vLLM-Metal's users have set already, with what reads them; None leaves the setting alone."""
    scope: Literal["daemon", "every model", "default model"] = "daemon"
    """What it is about; a setting of models may stand in the section of one model too."""
    model: str = ""
    """Whose section, `[models."name"]`, it stands in, if in one."""

    @property
    def table(self) -> tuple[str, ...]:
        """The path of the TOML table that holds it."""
        return (self.section, self.model) if self.model else (self.section,)

    @property
    def key(self) -> str:
        return f"{dotted(self.table)}.{self.name}"

    @property
    def environment(self) -> str:
        return f"METAL_{self.section}_{self.name}".upper()

    @property
    def option(self) -> str:
        """What sets it on the command line, where anything does."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def example(self) -> object:
        """The default, or where that is "not set" a value that could be set."""
        if self.default is not None:
            return self.default
        return self.kind(self.minimum or 0 if self.above is None else self.maximum)

    @property
    def rule(self) -> str:
        """What a value must be, to follow "must be"."""
        if self.choices:
            quoted = [render(choice) for choice in self.choices]
            return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        noun = _NOUNS[self.kind]
        if self.required:
            noun = noun.replace("a ", "a non-empty ", 1)
        return f"{noun}{self.limits}" + (f", {self.reason}" if self.reason else "")

    @property
    def limits(self) -> str:
        if self.above is not None:
            return f" above {self.above} and at most {self.maximum}"
        if self.maximum is not None:
            return f" from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f", {self.minimum} or more" + (", or 0" if self.or_zero else "")
        return ""

    def read(self, text: str) -> object:
        """The value that `text` of a variable or a command line stands for, unchecked."""
        if self.kind in (tuple, dict):
            return tuple(item.strip() for item in text.split(",") if item.strip())
        if self.kind is bool:
            return _BOOLEANS.get(text.lower(), text)
        try:
            return self.kind(text)
        except ValueError:
            return text

    def check(self, value: object, subject: str) -> object:
        """The value as its section holds it: a table may be given as its items, each like "name=value".

        `subject` begins the message of the `ConfigError`.
        """
        if self.kind is tuple and isinstance(value, (str, list)):
            value = (value,) if isinstance(value, str) else tuple(value)
        elif self.kind is dict and isinstance(value, tuple):
            value = self._table(value, subject)
        elif self.choices and isinstance(value, str):
            value = self.synonyms.get(value, value)
        if not self._allows(value):
            got = "a value that is kept secret" if self.secret else shown(value)
            raise ConfigError(f"{subject} must be {self.rule}, got {got}", hint=f"`{self.key}`: {self.doc}")
        return float(value) if self.kind is float and isinstance(value, int) else value

    def _table(self, items: tuple[str, ...], subject: str) -> dict[str, str]:
        table: dict[str, str] = {}
        for item in items:
            name, _, value = map(str.strip, item.partition("="))
            if not name or not value:
                form = f"name={'path' if self.is_path else 'value'}"
                raise ConfigError(
                    f"{subject} must be like `{form}`, got {shown(item)}", hint=f"`{self.key}`: {self.doc}"
                )
            if name in table:
                raise ConfigError(f"{subject} names `{name}` twice", hint="leave one of the two out")
            table[name] = value
        return table

    def _allows(self, value: object) -> bool:
        # The exact type, because to Python a boolean is a number.
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            return False
        if isinstance(value, tuple):
            return all(isinstance(item, str) and item for item in value)
        if isinstance(value, dict):
            return all(isinstance(item, str) and item for pair in value.items() for item in pair)
        if isinstance(value, (int, float)):
            # Nor what is no number, or a whole one beyond what a float can be.
            if self.kind is float and not abs(value) <= sys.float_info.max:
                return False
            return (self.or_zero and value == 0) or (
                (self.minimum is None or value >= self.minimum)
                and (self.above is None or value > self.above)
                and (self.maximum is None or value <= self.maximum)
            )
        return (not self.choices or value in self.choices) and bool(value or not self.required)

    def resolve(self, value: object) -> object:
        """The value with the `~` of a path, or of each path of a table, filled in."""
        if not self.is_path:
            return value
        if isinstance(value, dict):
            return {name: paths.expand_home(path) for name, path in value.items()}
        return paths.expand_home(value) if isinstance(value, str) else value

    def public(self, value: object) -> object:
        """The value as it may be shown."""
        return tuple("***" for _ in value) if self.secret and isinstance(value, tuple) else value

    def text(self, value: object) -> str:
        """The value as it may be shown, in TOML."""
        return "unset" if value is None else render(self.public(value))


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}

_NOUNS = {
    bool: "true or false",
    str: "a string",
    int: "a whole number",
    float: "a number",
    tuple: "a list of non-empty strings",
    dict: "a table of non-empty strings",
}


def shown(value: object) -> str:
    """`value` for a message: TOML on one line, cut where it is long."""
    text = "a table" if isinstance(value, dict) else " ".join(render(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"
