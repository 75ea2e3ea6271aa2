"""OpenAI's list of models."""

from __future__ import annotations

from msgspec import Struct


class Model(Struct, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str = "vllm-metal"


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[Model]
