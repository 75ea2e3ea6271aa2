"""Puts entries into the text of a settings file, and keeps the rest of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm_metal.agents.agent import Settings
from vllm_metal.toml_document import TomlDocument, render

Entries = Mapping[str, Any]


def merged(settings: Settings, text: str) -> str:
    """`text` of the file with the entries. Raises ValueError where they cannot be put there without harm."""
    entries = settings.entries if text.strip() else {**settings.heading, **settings.entries}
    match settings.file.suffix:
        case ".json":
            return _json(text, entries)
        case ".toml":
            return _toml(text, entries)
        case _:
            return _yaml(text, entries)


def _json(text: str, entries: Entries) -> str:
    data = json.loads(text) if text.strip() else {}
    if not isinstance(data, dict):
        raise ValueError("it holds no JSON object")
    return json.dumps(_updated(data, entries), indent=_indent(text), ensure_ascii=False) + "\n"


def _updated(data: dict[str, Any], entries: Entries) -> dict[str, Any]:
    """Objects are merged, all else is replaced."""
    for key, value in entries.items():
        held = data.get(key)
        data[key] = _updated(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return data


def _indent(text: str) -> int | str:
    found = re.search(r"\{\n([ \t]+)", text)
    return found[1] if found else 2


def _toml(text: str, entries: Entries) -> str:
    """A dotted name is one of a table, whose keys are the value's."""
    for name, value in entries.items():
        if isinstance(value, dict):
            for key, item in value.items():
                text = TomlDocument(text).with_value(tuple(name.split(".")), key, item, default=item)
        elif name in TomlDocument(text).data:
            text = TomlDocument(text).with_value((), name, value, default=value)
        else:
            # The only place that is sure to be in no table.
            text = f"{name} = {render(value)}\n{text}"
    TomlDocument(text)
    return text


def _yaml(text: str, entries: Entries) -> str:
    """Values are written as JSON, which is YAML too. Of the lists, each has one item, known by its name."""
    for key, value in entries.items():
        found = re.search(rf"^{re.escape(key)}:[ \t]*(.*)$", text, re.MULTILINE)
        if isinstance(value, list):
            text = _with_item(text, key, value[0], found)
        elif found:
            text = f"{text[: found.start()]}{key}: {json.dumps(value)}{text[found.end() :]}"
        else:
            text = _ended(text) + f"{key}: {json.dumps(value)}\n"
    return text


def _with_item(text: str, key: str, item: Entries, found: re.Match[str] | None) -> str:
    line = f"- {json.dumps(item)}\n"
    if found is None:
        return f"{_ended(text)}{key}:\n  {line}"
    if found[1] and not found[1].startswith("#"):
        raise ValueError(f"`{key}` is written on one line")
    ours = rf'^([ \t]*)- \{{"name": {json.dumps(item["name"])}, .*\n?'
    if re.search(ours, text, re.MULTILINE):
        return re.sub(ours, lambda own: own[1] + line, text, count=1, flags=re.MULTILINE)
    first = re.compile(r"^([ \t]*)- ", re.MULTILINE).search(text, found.end())
    indent = first[1] if first else "  "
    head = _ended(text[: found.end()])
    return f"{head}{indent}{line}{text[found.end() :].removeprefix(chr(10))}"


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
