"""What models may take of the device's memory, and how those that are loaded share it. No MLX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_metal.errors import InsufficientMemory

#: Tokens of KV that a model has room for at least while others are loaded beside it.
USEFUL_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed:
    """Bytes that a model takes. KV is that of one request: `full_kv_bytes` of the longest that is served,
    `useful_kv_bytes` of one of at most USEFUL_TOKENS, `least_kv_bytes` of the shortest.

    `step_bytes`, what a step takes beside them, is known once the model is loaded.
    """

    weight_bytes: int = 0
    step_bytes: int = 0
    least_kv_bytes: int = 0
    useful_kv_bytes: int = 0
    full_kv_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """Of a model that is alone."""
        return self.weight_bytes + self.step_bytes + self.least_kv_bytes


class TooTight(InsufficientMemory):
    """Found while a model was loaded: by what it turns out to need, others may have to give way to it."""

    def __init__(self, message: str, need: ModelNeed, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.need = need


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`utilization` of `device_bytes`, as set by `engine.gpu_memory_utilization`."""

    device_bytes: int
    utilization: float

    @property
    def num_bytes(self) -> int:
        return int(self.utilization * self.device_bytes)

    def fits(self, needs: Sequence[ModelNeed]) -> bool:
        """Whether these models can be loaded together, each of use. One that is alone may be cramped."""
        return self._left(needs) >= sum(
            need.useful_kv_bytes if len(needs) > 1 else need.least_kv_bytes for need in needs
        )

    def kv_shares(self, needs: Sequence[ModelNeed]) -> list[int]:
        """How much KV each of the loaded models may hold: enough for its longest request where that is there
        for all, and as much of it for one as for another where it is not.
        """
        left = max(self._left(needs), 0)
        for small, large in (
            ([0 for _ in needs], [need.useful_kv_bytes for need in needs]),
            ([need.useful_kv_bytes for need in needs], [need.full_kv_bytes for need in needs]),
        ):
            if left < sum(large):
                part = (left - sum(small)) / max(sum(large) - sum(small), 1)
                return [low + int(part * (high - low)) for low, high in zip(small, large, strict=True)]
        holders = sum(need.full_kv_bytes > 0 for need in needs)
        extra = (left - sum(need.full_kv_bytes for need in needs)) // max(holders, 1)
        return [need.full_kv_bytes + extra if need.full_kv_bytes else 0 for need in needs]

    def require(self, name: str, need: ModelNeed, pinned: Sequence[ModelNeed] = ()) -> None:
        """Raises InsufficientMemory where the model does not fit beside those that never give way."""
        if self.fits([need, *pinned]):
            return
        kv_bytes = need.useful_kv_bytes if pinned else need.least_kv_bytes
        wanted = need.weight_bytes + need.step_bytes + kv_bytes
        kept = sum(each.weight_bytes + each.useful_kv_bytes for each in pinned)
        kept += max((each.step_bytes for each in pinned), default=0)
        held = f", of which pinned models hold {_gb(kept)}" if kept else ""
        raise InsufficientMemory(
            f"`{name}` needs {_gb(wanted)} of memory, and `engine.gpu_memory_utilization` = "
            f"{self.utilization:g} allows {_gb(self.num_bytes)} of {_gb(self.device_bytes)}{held}",
            hint=_advice((wanted + kept) / max(self.device_bytes, 1), is_kept=bool(kept)),
        )

    def _left(self, needs: Sequence[ModelNeed]) -> int:
        """For KV. Only one model steps at a time."""
        taken = sum(need.weight_bytes for need in needs) + max((need.step_bytes for need in needs), default=0)
        return self.num_bytes - taken


def _advice(share: float, *, is_kept: bool) -> str:
    value = math.ceil(100 * share) / 100
    unpin = ", or unpin a model" if is_kept else ""
    if value <= 1:
        return f"set `engine.gpu_memory_utilization` to {value:g} or more{unpin}, or use a smaller model"
    return f"no value would do: use a smaller or more quantized model{unpin}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
