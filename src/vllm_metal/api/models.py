"""OpenAI's list of models."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from vllm_metal.hub.model_kind import ModelKind


class Model(Struct, tag_field="object", tag="model"):
    """`max_model_len` is what the model itself takes until it is loaded; `state` is "ok" while it is.
    `parent` is the model that a LoRA adapter is of; `kind` is what it is for, as far as is known.
    """

    id: str
    created: int
    owned_by: str = "vllm-metal"
    max_model_len: int | None = None
    parent: str | None = None
    kind: ModelKind | None = None
    state: Literal["ok", "loading", "failed", "unloading", "unloaded"] = "unloaded"


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[Model]
