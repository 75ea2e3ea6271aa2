"""Every path the product uses, in one place. All follow the platform's conventions (platformdirs)."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "vllm-metal"


def expand_home(text: str) -> str:
    """`text` with a leading `~` filled in; the home of an unknown user stays as it is."""
    # Not `Path.expanduser`, which raises there.
    return os.path.expanduser(text)  # noqa: PTH111


def config_file() -> Path:
    return Path(platformdirs.user_config_dir(APP, appauthor=False)) / "config.toml"


def data_dir() -> Path:
    """Where models that have no home in the hub cache are kept."""
    return Path(platformdirs.user_data_dir(APP, appauthor=False))


def models_dir() -> Path:
    return data_dir() / "models"


def state_dir() -> Path:
    """Small files that describe the daemon: why it last stopped, chat history."""
    return Path(platformdirs.user_state_dir(APP, appauthor=False))
