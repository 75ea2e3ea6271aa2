"""What a user may call a model: a hub repository, a path or a short name."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_metal.config import Config
from vllm_metal.errors import ModelNotFound
from vllm_metal.hub import other_tools, own_folder
from vllm_metal.hub.aliases import ALIASES
from vllm_metal.hub.catalogue import known_models
from vllm_metal.settings import ModelsConfig


@dataclass(frozen=True, slots=True)
class HubSource:
    """`repo` is `org/name`; `revision` is a branch, tag or commit, None for the default branch.

    `quant` names one of several GGUF files, as in `Q4_0`.
    """

    repo: str
    revision: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.quant}" if self.quant else "")

    @property
    def name(self) -> str:
        """What the model is served as."""
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True, slots=True)
class PathSource:
    """An existing folder or file, absolute and with symbolic links kept.

    `label` is what another program calls it, where its own name says nothing.
    """

    path: Path
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.label or str(self.path)

    @property
    def name(self) -> str:
        """What the model is served as."""
        return self.label or self.path.name.removesuffix(".gguf")


@dataclass(frozen=True, slots=True)
class AliasSource:
    name: str

    def __str__(self) -> str:
        return self.name


Source = HubSource | PathSource | AliasSource

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO = re.compile(rf"({_PART}/{_PART})(?:@([^\s@:]+))?(?::([A-Za-z0-9._-]+))?")
_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)"
    r"/([^/\s?#]+/[^/\s?#]+)(?:/(?:tree|blob|resolve)/([^/\s?#]+)[^\s?#]*)?/?(?:[?#]\S*)?"
)
_MAX_REPO_LENGTH = 96


def parse_source(text: str, models: ModelsConfig) -> Source:
    """The first that fits of: short name, path that exists, hub repository. Raises `ModelNotFound`.

    Of short names, those that the user has given go first, then those that we know, then those of the models
    in `models.dir`.
    """
    text = text.strip()
    text = models.default if text in models.served_names else text
    text = models.aliases.get(text, text)
    if source := _short_name(text):
        return source
    if path := other_tools.find(text):
        return PathSource(path, label=text)
    if "/" not in text and (path := short_names(models).get(text)):
        return PathSource(path)
    if path := _existing_path(text):
        return PathSource(path)
    if text.startswith(("/", "~", "./", "../")) or text.endswith(".gguf"):
        raise ModelNotFound(f"`{text}` does not exist", hint="check the path")
    if source := _hub_source(text):
        return source
    raise ModelNotFound(f"there is no model `{text}`", hint=_advice(text, models))


def short_names(models: ModelsConfig) -> dict[str, Path]:
    """Of the models in `models.dir`, but for names that mean something else."""
    taken = {*models.served_names, *models.adapters, *models.aliases, *ALIASES, *known_models()}
    found = own_folder.short_names(models.store)
    return {name: path for name, path in found.items() if name not in taken}


def may_be_pulled(text: str, aliases: Mapping[str, str]) -> bool:
    """Whether it looks like something that can be fetched. Unlike `parse_source` it looks at no path, so that
    anybody may ask.
    """
    text = aliases.get(text, text)
    return (_short_name(text) or _hub_source(text)) is not None


def configured_source(models: ModelsConfig) -> Source:
    """The model that is served when none is named. Raises as `parse_source` does."""
    source = parse_source(models.default, models)
    if models.revision and isinstance(source, HubSource):
        return replace(source, revision=models.revision)
    return source


def config_for(name: str, config: Config) -> Config:
    """`Config.for_model`, also where the file calls the model by another of its names.

    Raises as `parse_source` does.
    """
    source = _of_any_revision(parse_source(name, config.models))
    synonyms = []
    for other in (config.models.default, *config.model_sections):
        with suppress(ModelNotFound):
            if _of_any_revision(parse_source(other, config.models)) == source:
                synonyms.append(other)
    return config.for_model(name, synonyms=synonyms)


def _of_any_revision(source: Source) -> Source:
    return replace(source, revision=None) if isinstance(source, HubSource) else source


def _short_name(text: str) -> AliasSource | HubSource | None:
    if text in ALIASES:
        return AliasSource(text)
    if model := known_models().get(text):
        return HubSource(model.repo)
    return None


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(os.path.normpath(Path(text).expanduser().absolute()))
        return path if text and path.exists() else None
    except PermissionError:
        return path
    except (OSError, ValueError, RuntimeError):
        return None  # longer than a path can be, holds a null byte, or names a home that does not exist


def _hub_source(text: str) -> HubSource | None:
    if url := _URL.fullmatch(text):
        repo, revision = url.groups()
        text = f"{repo}@{revision}" if revision else repo
    match = _REPO.fullmatch(text)
    if match is None:
        return None
    repo, revision, quant = match.groups()
    # The hub's own rules, on top of its alphabet.
    if len(repo) > _MAX_REPO_LENGTH or "--" in repo or ".." in repo or repo.endswith(".git"):
        return None
    return HubSource(repo, revision, quant)


def _advice(text: str, models: ModelsConfig) -> str:
    known = [*models.aliases, *ALIASES, *known_models(), *short_names(models)]
    if near := difflib.get_close_matches(text.lower(), known, n=1):
        return f"did you mean `{near[0]}`?"
    return "name a hub model as `org/name`, or give the path of a model folder or `.gguf` file"
