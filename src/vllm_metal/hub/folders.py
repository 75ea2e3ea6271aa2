"""The folders that models are read from, and whether this process may read them."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_metal import paths
from vllm_metal.settings import ModelsConfig


def model_folders(models: ModelsConfig) -> list[Path]:
    """The hub's cache, the folder of other models, and the model itself where it is named by its path."""
    from huggingface_hub import constants

    named = Path(paths.expand_home(models.default))
    return [Path(constants.HF_HUB_CACHE), models.store, *([named] if named.is_absolute() else [])]


def read_problem(path: Path) -> str | None:
    """Why `path` cannot be read, found by reading; None if it can or does not exist. May hang."""
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                path = next((Path(entry) for entry in entries if entry.is_file()), path)
        if path.is_file():
            with path.open("rb") as file:
                file.read(1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return exc.strerror or str(exc)
    return None
