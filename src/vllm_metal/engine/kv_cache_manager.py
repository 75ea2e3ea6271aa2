"""Counts the KV memory that requests hold, in bytes. Holds no array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_metal.engine.request import Request

#: Tokens by which a request's KV grows at a time: mlx-lm's `KVCache.step`.
KV_STEP = 256


@dataclass(frozen=True, slots=True)
class KVLayerGroup:
    """Layers whose KV grows alike: `bytes_per_token` in all, up to `max_tokens` (a window) if set."""

    bytes_per_token: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one request of a model costs; `state_bytes` is its part that does not grow (recurrent state)."""

    groups: tuple[KVLayerGroup, ...]
    state_bytes: int = 0

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes for the KV of `num_tokens` tokens, rounded up to whole steps."""
        rounded = _num_steps(num_tokens) * KV_STEP
        return self.state_bytes + sum(
            group.bytes_per_token * min(rounded, group.max_tokens or rounded) for group in self.groups
        )

    @property
    def bytes_per_token(self) -> int:
        """With windows not taken into account: what a slot costs, which holds every token of every layer."""
        return sum(group.bytes_per_token for group in self.groups)


class KVCacheManager(Protocol):
    """Grants and takes back KV memory within `budget_bytes`."""

    budget_bytes: int

    @property
    def used_bytes(self) -> int: ...

    def allocate(self, request: Request) -> bool:
        """Let `request` hold KV for all its tokens; false, and nothing changed, if they do not fit."""

    def free(self, request: Request) -> None:
        """Take back all that `request` holds; harmless if it holds nothing."""

    def max_num_tokens(self, limit: int) -> int:
        """The longest request, up to `limit` tokens, that fits when it is alone."""

    def restore(self, request: Request) -> int:
        """Give a newcomer, just allocated, the KV that is kept of its beginning; returns how many tokens."""

    def store(self, request: Request) -> None:
        """Keep the KV that `request` has computed, for others that begin alike."""

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether another computes just now what `request` begins with."""


class RectangularKVCacheManager:
    """For a left-padded decode batch, which is a rectangle: every row costs as much as the longest."""

    def __init__(self, spec: KVCacheSpec, budget_bytes: int) -> None:
        self.spec = spec
        self.budget_bytes = budget_bytes
        self._num_tokens: dict[Request, int] = {}

    @property
    def used_bytes(self) -> int:
        if not self._num_tokens:
            return 0
        return len(self._num_tokens) * self.spec.num_bytes(max(self._num_tokens.values()))

    def allocate(self, request: Request) -> bool:
        held = self._num_tokens.get(request)
        self._num_tokens[request] = request.num_tokens
        # Most decodes stay within their step, and need no look at all the others.
        if held is not None and _num_steps(held) == _num_steps(request.num_tokens):
            return True
        if self.used_bytes <= self.budget_bytes:
            return True
        if held is None:
            del self._num_tokens[request]
        else:
            self._num_tokens[request] = held
        return False

    def free(self, request: Request) -> None:
        self._num_tokens.pop(request, None)

    def restore(self, request: Request) -> int:
        return 0

    def store(self, request: Request) -> None:
        pass

    def is_worth_waiting(self, request: Request) -> bool:
        return False

    def max_num_tokens(self, limit: int) -> int:
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.spec.num_bytes(middle) <= self.budget_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def _num_steps(num_tokens: int) -> int:
    return -(-num_tokens // KV_STEP)
