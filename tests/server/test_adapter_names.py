"""Adapters by their names, and names that stand for two things."""

from __future__ import annotations

import pytest

from vllm_metal import config
from vllm_metal.errors import ConfigError
from vllm_metal.server.adapter_names import adapter_names

TWO_MODELS = """
[models]
default = "org/first"
aliases = { short = "org/first" }
[models.adapters]
a = "/a"
[models."org/second".adapters]
b = "/b"
c = "/c"
"""


def names(tmp_path, text, **flags):
    file = tmp_path / "config.toml"
    file.write_text(text)
    return adapter_names(config.load(path=file, environ={}, flags=flags), "served")


def test_each_goes_with_its_model(tmp_path):
    assert names(tmp_path, TWO_MODELS) == {"a": "served", "b": "org/second", "c": "org/second"}


def test_the_default_model_may_have_its_adapters_in_its_section(tmp_path):
    text = '[models]\ndefault = "short"\naliases = { short = "org/m" }\n[models."org/m".adapters]\na = "/a"'
    assert names(tmp_path, text) == {"a": "served"}


def test_a_model_may_go_by_the_name_of_its_folder(tmp_path):
    text = '[models]\ndefault = "org/m"\n[models."folder".adapters]\na = "/a"'
    assert names(tmp_path, text) == {"a": "folder"}


@pytest.mark.parametrize("name", ["org/first", "org/second", "short", "served"])
def test_names_of_models_are_refused(tmp_path, name):
    message = f"`{name}` is the name of a model and of an adapter of `org/first`"
    with pytest.raises(ConfigError, match=message):
        names(tmp_path, TWO_MODELS.replace("a = ", f'"{name}" = '))


def test_a_served_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="`a` is the name of a model and of an adapter of `org/first`"):
        names(tmp_path, TWO_MODELS, **{"models.served_names": ["m", "a"]})


def test_a_name_of_two_adapters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="an adapter of `served` and of one of `org/second`"):
        names(tmp_path, TWO_MODELS.replace("c = ", "a = "))
