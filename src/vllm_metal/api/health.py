"""What the server says of itself."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Health(Struct, omit_defaults=True):
    """`stage` and `detail` are in words: what is being done, and why not more."""

    status: Literal["ok", "loading", "failed", "draining"]
    stage: str | None = None
    detail: str | None = None


class Version(Struct, omit_defaults=True):
    """`package_sha256` is of the code that `metal setup` has put down: it changes without its version."""

    version: str
    pid: int
    package_sha256: str | None = None
    restart_needed: bool = False


class Load(Struct):
    """Requests that run or wait."""

    server_load: int
