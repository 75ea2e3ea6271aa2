"""What asks for a model to be loaded or unloaded."""

from __future__ import annotations

from vllm_metal.api.keep_alive import KeepAlive
from vllm_metal.api.request_body import RequestBody


class LoadRequest(RequestBody, kw_only=True):
    """`keep_alive` is for how long the model stays without requests, else as configured."""

    keep_alive: KeepAlive | None = None


class UnloadRequest(RequestBody):
    pass
