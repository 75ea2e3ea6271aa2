from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal import config
from vllm_metal.errors import ModelNotFound
from vllm_metal.hub import names
from vllm_metal.hub.catalogue import known_models
from vllm_metal.hub.names import (
    AliasSource,
    HubSource,
    PathSource,
    Source,
    config_for,
    configured_source,
)
from vllm_metal.settings import ModelsConfig

PART = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9]|[._-][A-Za-z0-9]){0,20}", fullmatch=True).filter(
    lambda part: not part.endswith(".git")
)
REVISION = st.from_regex(r"[A-Za-z0-9._/-]{1,20}", fullmatch=True)
QUANT = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)


def parse_source(text: str, **models: Any) -> Source:
    return names.parse_source(text, ModelsConfig(**models))


@given(PART, PART, st.none() | REVISION, st.none() | QUANT)
def test_source_reads_back_what_it_prints(
    org: str, name: str, revision: str | None, quant: str | None
) -> None:
    source = HubSource(f"{org}/{name}", revision, quant)
    assert parse_source(str(source)) == source


@given(st.text(max_size=40))
def test_any_text_is_a_source_or_not_found(text: str) -> None:
    with suppress(ModelNotFound):
        assert isinstance(parse_source(text), (AliasSource, HubSource, PathSource))


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("smollm2", AliasSource("smollm2")),
        (" mlx-community/Qwen3-0.6B-4bit ", HubSource("mlx-community/Qwen3-0.6B-4bit")),
        ("org/name@refs/pr/1", HubSource("org/name", "refs/pr/1")),
        ("org/name:Q4_0", HubSource("org/name", None, "Q4_0")),
        ("org/name@v1:UD-Q2_K_XL", HubSource("org/name", "v1", "UD-Q2_K_XL")),
        ("hf.co/org/name", HubSource("org/name")),
        ("hf.co/org/name@v1", HubSource("org/name", "v1")),
        ("https://huggingface.co/org/name", HubSource("org/name")),
        ("https://huggingface.co/org/name/", HubSource("org/name")),
        ("https://huggingface.co/org/name?library=mlx", HubSource("org/name")),
        ("https://huggingface.co/org/name/tree/main", HubSource("org/name", "main")),
        ("https://huggingface.co/org/name/blob/v1/config.json", HubSource("org/name", "v1")),
    ],
)
def test_accepted(text: str, source: object) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "org/name@",
        "org/name:",
        "org/name:Q4_0@v1",
        "org/name/file",
        "org/na--me",
        "-org/name",
        "org/name.git",
        "https://huggingface.co/datasets/org/name",
        "https://example.com/org/name",
        f"org/{'n' * 100}",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse_source(text)
    assert "`org/name`" in str(caught.value.hint)


def test_near_miss_of_an_alias_is_named() -> None:
    with pytest.raises(ModelNotFound, match="there is no model `SmoLLM4`") as caught:
        parse_source("SmoLLM4")
    assert caught.value.hint in ("did you mean `smollm2`?", "did you mean `smollm3`?")
    with pytest.raises(ModelNotFound) as caught:
        parse_source("daly", aliases={"daily": "org/name"})
    assert caught.value.hint == "did you mean `daily`?"


@pytest.mark.parametrize("name", known_models())
def test_known_models_are_of_the_hub(name: str) -> None:
    model = known_models()[name]
    source = parse_source(name)
    assert source == parse_source(model.repo) == HubSource(model.repo)
    assert model.kind in ("chat", "code", "small")
    assert model.size_gb < model.needs_gb in (8, 16, 24, 32, 64)


def test_a_users_own_names_go_first_and_may_stand_for_ours(tmp_path: Path) -> None:
    aliases = {
        "daily": "org/name@v1:Q4_0",
        "qwen3-4b": "org/other",
        "small": "smollm2",
        "here": str(tmp_path),
    }
    assert parse_source("daily", aliases=aliases) == HubSource("org/name", "v1", "Q4_0")
    assert parse_source("qwen3-4b", aliases=aliases) == HubSource("org/other")
    assert parse_source("small", aliases=aliases) == AliasSource("smollm2")
    assert parse_source("here", aliases=aliases) == PathSource(tmp_path)


def test_the_configured_model_may_be_a_name_of_the_users() -> None:
    models = ModelsConfig(default="daily", aliases={"daily": "org/name"}, revision="v2")
    assert configured_source(models) == HubSource("org/name", "v2")


def test_paths_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "blob").touch()
    (tmp_path / "link.gguf").symlink_to("blob")
    for text in ("org/name", "./org/name", "org/../org/name", "~/org/name", str(tmp_path / "org" / "name")):
        assert parse_source(text) == PathSource(tmp_path / "org" / "name")
    assert parse_source("link.gguf") == PathSource(tmp_path / "link.gguf")
    assert parse_source("./smollm2") == PathSource(tmp_path / "smollm2")
    assert parse_source("smollm2") == AliasSource("smollm2")


@pytest.mark.parametrize(
    "text", ["./name", "../name", "/nowhere/name", "~/nowhere", "~nobody-here/x", "model.gguf"]
)
def test_paths_that_do_not_exist(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=f"`{text}` does not exist"):
        parse_source(text)


def test_the_short_names_of_models_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, models_dir = tmp_path / "here", tmp_path / "models"
    for name in ("tiny", "one/twice", "two/twice", "deep/er/alone", "daily", "gpt", "lora", "qwen3-4b"):
        (models_dir / name).mkdir(parents=True)
        (models_dir / name / "config.json").touch()
    (models_dir / "files").mkdir()
    (models_dir / "files" / "small.gguf").touch()
    (here / "tiny").mkdir(parents=True)
    monkeypatch.chdir(here)
    models: dict[str, Any] = {
        "dir": "../models",
        "default": "org/name",
        "served_names": ("gpt",),
        "aliases": {"daily": "tiny"},
        "adapters": {"lora": "/adapter"},
    }
    for name, path in {
        "tiny": "tiny",
        "alone": "deep/er/alone",
        "small": "files/small.gguf",
        "daily": "tiny",
    }.items():
        source = parse_source(name, **models)
        assert isinstance(source, PathSource)
        assert source.path.resolve() == models_dir / path
    assert parse_source("./tiny", **models) == PathSource(here / "tiny")
    assert parse_source("gpt", **models) == HubSource("org/name")
    assert parse_source("qwen3-4b", **models) == HubSource(known_models()["qwen3-4b"].repo)
    for name in ("twice", "lora", "Tiny"):
        with pytest.raises(ModelNotFound) as caught:
            parse_source(name, **models)
    assert caught.value.hint == "did you mean `tiny`?"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter any folder")
def test_a_folder_that_may_not_be_entered_hides_no_other(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "b").chmod(0o400)
    assert [parse_source(name, dir=str(tmp_path)).name for name in "ac"] == ["a", "c"]


def test_a_section_holds_for_a_model_under_any_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    name, known = next(iter(known_models().items()))
    file = tmp_path / "config.toml"
    file.write_text(
        f"[models]\ndefault = 'mine'\naliases = {{ mine = 'o/main', other = 'o/other' }}\n"
        f"[models.'gone/../{tmp_path}/x']\nttl = 1\n"
        f"[models.'{known.repo}']\nttl = 2\n[models.other]\nttl = 3\n[models.'o/main']\nttl = 4\n"
        f"[models.'{folder}/']\nttl = 5\n"
    )
    loaded = config.load(path=file, environ={})
    ttls = {
        each: config_for(each, loaded).models.ttl
        for each in (name, known.repo, "o/other", "o/other@v1", "o/other:Q4_0", "mine", "o/main", str(folder))
    }
    assert ttls == {
        name: 2,
        known.repo: 2,
        "o/other": 3,
        "o/other@v1": 3,
        "o/other:Q4_0": 1800,
        "mine": 4,
        "o/main": 4,
        str(folder): 5,
    }
    assert config_for("o/main", loaded).models.preload
    with pytest.raises(ModelNotFound):
        config_for("no such model", loaded)
