"""The folders that models come from, as the daemon sees them."""

from __future__ import annotations

from msgspec import Struct


class ModelFolder(Struct):
    """`detail` says why one is not readable."""

    path: str
    readable: bool
    detail: str | None = None


class ModelFolders(Struct):
    folders: list[ModelFolder]
