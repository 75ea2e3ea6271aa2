"""What names in requests mean: the models on this machine that can be served, by all they may be called."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.config import Config
from vllm_metal.errors import MetalError, ModelNotFound
from vllm_metal.hub import names, store
from vllm_metal.hub.catalogue import known_models
from vllm_metal.hub.installed import InstalledModel, installed_models, told_context_length
from vllm_metal.hub.model_kind import ModelKind, model_kind
from vllm_metal.hub.store import LocalModel

logger = logging.getLogger(__name__)

_FRESH_S = 1.0
_MAX_NEAR_LENGTH = 200
#: macOS may hold up for ever whoever reads a folder without leave.
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class ListedModel:
    """`names` are all that it may be asked for by, `local.name` the one that it goes by. `max_model_len` is
    what will be served of it, where there is memory for that.
    """

    local: LocalModel
    names: frozenset[str]
    max_model_len: int | None
    kind: ModelKind


class ModelDirectory:
    """Looks at the disk for whoever asks, on a thread and not more often than it changes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._latest: list[ListedModel] = []
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")

    async def models(self, *, since: float | None = None) -> list[ListedModel]:
        """Those that are whole on disk, or were at a time that is not before `since`, if it can be read."""
        if since is None:
            since = asyncio.get_running_loop().time() - _FRESH_S
        while self._looked_at < since:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            done, _ = await asyncio.wait([self._looking], timeout=_PATIENCE_S)
            if not done:
                break
        return self._latest

    async def find(self, name: str, served_names: list[str]) -> ListedModel:
        """Raises ModelNotFound, with what is nearest; `served_names` are those of the default model."""
        came_at = asyncio.get_running_loop().time()
        for since in (None, came_at):  # one that is not there may have come just now
            models = await self.models(since=since)
            if model := next((each for each in models if name in each.names), None):
                return model
        hint = f"served: {', '.join(f'`{served}`' for served in served_names)}; `model` may be left out"
        known = sorted({*served_names, *(each.local.name for each in models)})
        if len(name) <= _MAX_NEAR_LENGTH and (near := difflib.get_close_matches(name, known, cutoff=0.5)):
            hint = f"did you mean {' or '.join(f'`{each}`' for each in near)}?"
        if names.may_be_pulled(name, self._config.models.aliases):
            hint = f"`metal pull {name}` fetches it; {hint}"
        raise ModelNotFound(f"the model `{name}` is not served here", hint=hint)

    async def _look(self) -> None:
        began_at = asyncio.get_running_loop().time()
        try:
            self._latest = await asyncio.to_thread(lambda: list(_listed(self._config)))
        # What was there before can be served all the same.
        except Exception:
            logger.exception("the models on this machine could not be looked through")
        finally:
            self._looked_at = began_at
            self._looking = None


def _listed(config: Config) -> Iterator[ListedModel]:
    installed = {model.path: model for model in installed_models(config.models.store)}
    given = dict(_given_names(config))
    short_names = {path: name for name, path in names.short_names(config.models).items()}
    for path in dict.fromkeys([*installed, *given.values()]):
        model = installed.get(path)
        called = {name for name, each in given.items() if each == path}
        if model is not None:
            called |= set(_names_of(model))
        if path in short_names:
            called.add(short_names[path])
        local = LocalModel(_name(model, called), path)
        lengths = (
            config.for_model(local.name, synonyms=called).engine.max_model_len,
            told_context_length(path) if model is None else model.context_length,
        )
        length = min((each for each in lengths if each), default=None)
        yield ListedModel(local, frozenset(called), length, model_kind(path))


def _given_names(config: Config) -> Iterator[tuple[str, Path]]:
    """What the user calls models that are here."""
    models = config.models
    for name in (models.default, *models.aliases, *config.model_sections):
        with suppress(MetalError, OSError):
            source = names.configured_source(names.config_for(name, config).models)
            if local := store.find(source, models_dir=models.store):
                yield name, local.path


def _names_of(model: InstalledModel) -> Iterator[str]:
    yield model.name
    yield str(model.path)
    yield from (each.name for each in known_models().values() if each.repo == model.name)


def _name(model: InstalledModel | None, names: set[str]) -> str:
    """The shortest is what no path is; of hub models it is their own."""
    if model is not None and model.origin != "models.dir":
        return model.name
    return min(names, key=lambda name: ("/" in name, len(name), name))
