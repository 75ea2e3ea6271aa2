"""The well-known models of `catalogue.toml`, by the short names that they can be asked for with."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """`kind` is "chat", "code" or "small". `needs_gb` is the memory of a Mac that runs it well."""

    name: str
    kind: str
    repo: str
    size_gb: float
    needs_gb: int


@cache
def known_models() -> Mapping[str, KnownModel]:
    text = resources.files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8")
    return MappingProxyType(
        {
            name: KnownModel(name=name, kind=kind, **model)
            for kind, models in tomllib.loads(text).items()
            for name, model in models.items()
        }
    )
