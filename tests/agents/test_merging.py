"""Settings files of others: what we want is in there, and all that was there still is."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.agents.agent import Settings
from vllm_metal.agents.merging import merged

KEYS = st.sampled_from(["a", "b", "model", "models", "x y"])
VALUES = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=4)


def merge(name: str, text: str, **entries: Any) -> str:
    return merged(Settings(Path(name), entries, {"heading": 1}), text)


def updated(data: Any, entries: Any) -> Any:
    if not (isinstance(data, dict) and isinstance(entries, dict)):
        return entries
    return {key: updated(data.get(key), entries.get(key, data.get(key))) for key in data | entries}


@given(OBJECTS, OBJECTS, st.sampled_from([None, 2, 4, "\t"]))
def test_json(data: dict[str, Any], entries: dict[str, Any], indent: int | str | None) -> None:
    text = merged(Settings(Path("s.json"), entries), json.dumps(data, indent=indent))
    assert json.loads(text) == updated(data, entries)
    assert list(json.loads(text))[: len(data)] == list(data)


def test_json_keeps_its_indent() -> None:
    assert merge("s.json", '{\n    "é": 1\n}', b=2) == '{\n    "é": 1,\n    "b": 2\n}\n'


TOML = """\
# Mine.
model = "gpt" # the best
approval = "never"

[model_providers.other]  # at work
name = "Other"

[model_providers.metal]
name = "old"
extra = true
"""


def test_toml() -> None:
    provider = {"name": "vllm-metal", "base_url": "http://x/v1"}
    text = merge("c.toml", TOML, model="m", model_provider="metal", **{"model_providers.metal": provider})
    expected = TOML.replace('"gpt"', '"m"').replace('"old"', '"vllm-metal"')
    assert text == f'model_provider = "metal"\n{expected}base_url = "http://x/v1"\n'


def test_a_table_that_toml_has_not_yet() -> None:
    text = merge("c.toml", "[a]\nb = 1", model="m", **{"model_providers.metal": {"name": "x"}})
    assert tomllib.loads(text) == {"model": "m", "a": {"b": 1}, "model_providers": {"metal": {"name": "x"}}}


YAML = """\
name: mine  # at home
models:
  # the first
  - name: other
    provider: openai
    roles: [chat]
rules:
  - be kind
"""
ITEM = {"name": "vllm-metal", "model": "org/m", "roles": ["chat"]}


def test_yaml() -> None:
    text = merge("c.yaml", YAML, models=[ITEM])
    lines = text.splitlines(keepends=True)
    assert lines.pop(2).lstrip().startswith("- {")
    assert "".join(lines) == YAML
    assert yaml.safe_load(text)["models"][0] == ITEM
    # Ours is replaced.
    again = merge("c.yaml", text, models=[ITEM | {"model": "org/other"}])
    assert again == text.replace("org/m", "org/other")


@pytest.mark.parametrize(
    "text",
    ["", "other: 1", "models:\n- name: a\n", "models:\n", "models: # mine\n    - {name: a}\n", "models:"],
)
def test_lists_of_yaml(text: str) -> None:
    before = yaml.safe_load(text) or {"heading": 1}
    after = yaml.safe_load(merge("c.yaml", text, models=[ITEM], model="openai/m", warn=False))
    models = [ITEM, *(before.get("models") or [])]
    assert after == before | {"models": models, "model": "openai/m", "warn": False}


def test_values_of_yaml() -> None:
    text = "# mine\nmodel: gpt\nopenai-api-base: 'x'\ndark: true\n"
    text = merge("a.yml", text, model="openai/m: #1", **{"openai-api-base": "http://x"})
    assert text == '# mine\nmodel: "openai/m: #1"\nopenai-api-base: "http://x"\ndark: true\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", "{// mine\n}"),
        ("s.json", "[]"),
        ("s.json", "{"),
        ("c.toml", "a = "),
        ("c.toml", "models = 1"),
        ("c.toml", "models = {}"),
        ("c.yaml", "models: [{name: a}]"),
    ],
)
def test_what_cannot_be_kept_is_not_changed(name: str, text: str) -> None:
    models: Any = {"x": 1} if name.endswith("toml") else [ITEM]
    with pytest.raises(ValueError):
        merge(name, text, models=models)
