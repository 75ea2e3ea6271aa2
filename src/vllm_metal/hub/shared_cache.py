"""The models in the hub's own cache, which other programs share. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vllm_metal.paths import expand_home

_PREFIX = "models--"
_DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def folder() -> Path:
    """Where the hub's client keeps what it fetches, by the variables that it reads."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(expand_home(os.path.expandvars(named)))


def models() -> dict[str, Path]:
    """The folder of each model there, by the model's name."""
    try:
        folders = sorted(path for path in folder().iterdir() if path.name.startswith(_PREFIX))
    except OSError:
        return {}
    return {path.name.removeprefix(_PREFIX).replace("--", "/"): path for path in folders}


def model_folder(repo: str) -> Path:
    """Of `org/name`, there or not: `blobs` by checksum, and `snapshots` of links to them."""
    return folder() / f"{_PREFIX}{repo.replace('/', '--')}"


def snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of a commit, or of what a branch or tag was when it was last fetched; perhaps not whole."""
    there = model_folder(repo)
    commit = revision or _DEFAULT_REVISION
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (there / "refs" / commit).read_text().strip()
        except OSError:
            return None
    path = there / "snapshots" / commit
    return path if path.is_dir() else None


def snapshots(repo: str) -> dict[Path, str | None]:
    """The folder of each commit there, with what to ask for it by; None for the default branch."""
    there = model_folder(repo)
    names: dict[str, str] = {}
    try:
        for file in sorted((there / "refs").rglob("*")):
            if file.is_file():
                name = str(file.relative_to(there / "refs"))
                commit = file.read_text().strip()
                names[commit] = name if name == _DEFAULT_REVISION else names.get(commit, name)
        folders = sorted(path for path in (there / "snapshots").iterdir() if path.is_dir())
    except OSError:
        return {}
    revisions = {path: names.get(path.name, path.name) for path in folders}
    return {path: None if name == _DEFAULT_REVISION else name for path, name in revisions.items()}
