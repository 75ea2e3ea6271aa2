"""What the server is doing, for `metal status` and `metal ps`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelStatus(Struct):
    """`stage` and `detail` are as in Health, `path` is where the files are. `unloads_in_s` is null for never.
    What else may be null is until the model is loaded.
    """

    name: str
    status: Literal["ok", "loading", "failed", "unloading", "unloaded", "draining"]
    stage: str
    detail: str | None = None
    path: str | None = None
    size_bytes: int | None = None
    number_format: str | None = None
    device: str | None = None
    mode: str | None = None
    max_model_len: int | None = None
    load_s: float | None = None
    idle_s: float | None = None
    is_default: bool = False
    pinned: bool = False
    unloads_in_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0


class ServerStatus(Struct):
    version: str
    pid: int
    uptime_s: float
    restart_needed: bool
    models: list[ModelStatus]
    num_running: int
    num_waiting: int
