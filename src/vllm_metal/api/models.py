"""OpenAI's list of models."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Model(Struct, tag_field="object", tag="model"):
    """`max_model_len` is what the model itself takes until it is loaded; `state` is "ok" while it is.
    `parent` is the model that a LoRA adapter is of.
    """

    id: str
    created: int
    owned_by: str = "vllm-metal"
    max_model_len: int | None = None
    parent: str | None = None
    state: Literal["ok", "loading", "failed", "unloading", "unloaded"] = "unloaded"


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[Model]
