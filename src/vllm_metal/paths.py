"""Every path the product uses, in one place: where macOS, or XDG's base directories elsewhere, want them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

APP = "vllm-metal"


def expand_home(text: str) -> str:
    """`text` with a leading `~` filled in; the home of an unknown user stays as it is."""
    # Not `Path.expanduser`, which raises there.
    return os.path.expanduser(text)  # noqa: PTH111


def config_file() -> Path:
    return _folder("Application Support", "XDG_CONFIG_HOME", ".config") / "config.toml"


def data_dir() -> Path:
    """Where models that have no home in the hub cache are kept."""
    return _folder("Application Support", "XDG_DATA_HOME", ".local/share")


def models_dir() -> Path:
    return data_dir() / "models"


def state_dir() -> Path:
    """Small files that the product keeps for itself. `metal uninstall` knows each by its name."""
    return _folder("Application Support", "XDG_STATE_HOME", ".local/state")


def chat_history() -> Path:
    return state_dir() / "chat_history"


def last_used_dir() -> Path:
    """When each model was used last."""
    return state_dir() / "last_used"


def log_dir() -> Path:
    """Where the daemon's log files are."""
    if sys.platform == "darwin":
        return _library("Logs")
    return state_dir() / "log"


def cache_dir() -> Path:
    """What can be made again."""
    return _folder("Caches", "XDG_CACHE_HOME", ".cache")


def conversions_dir() -> Path:
    """Models that were converted for MLX."""
    return cache_dir() / "converted"


def venv(named: str | None = None) -> Path:
    """The environment that `metal setup` makes: as `named`, else `VLLM_METAL_VENV`, else in the home."""
    path = expand_home(named or os.environ.get("VLLM_METAL_VENV") or "~/.venv-vllm-metal")
    # Not `Path.absolute`, which leaves `..` for launchd to trip over, nor `resolve`: the venv is a link.
    return Path(os.path.abspath(path))  # noqa: PTH100


def launch_agents_dir() -> Path:
    """Where launchd looks for the user's services, at each login."""
    return Path(expand_home("~/Library/LaunchAgents"))


def _folder(library: str, variable: str, unix: str) -> Path:
    # A Mac's shell may set XDG's variables too, but launchd's daemon would not see them.
    if sys.platform == "darwin":
        return _library(library)
    named = Path(os.environ.get(variable, ""))
    # The XDG specification has relative paths ignored.
    return (named if named.is_absolute() else Path(expand_home("~")) / unix) / APP


def _library(name: str) -> Path:
    return Path(expand_home("~/Library")) / name / APP
