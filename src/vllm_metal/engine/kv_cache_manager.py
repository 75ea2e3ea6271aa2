"""Counts the KV memory that requests hold, in bytes. Holds no array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_metal.engine.request import Request

#: Tokens by which a request's KV grows at a time: mlx-lm's `KVCache.step`.
KV_STEP = 256
#: Most of the budget that requests gone by may keep: a daemon should not fill a machine because it can.
PREFIX_SHARE = 1 / 4


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
        return self.exact_bytes(num_steps(num_tokens) * KV_STEP)

    def exact_bytes(self, num_tokens: int) -> int:
        """Bytes for the KV of `num_tokens` tokens without room for more."""
        return self.state_bytes + sum(
            group.bytes_per_token * min(num_tokens, group.max_tokens or num_tokens) for group in self.groups
        )

    @property
    def bytes_per_token(self) -> int:
        """With windows not taken into account: what a slot costs, which holds every token of every layer."""
        return sum(group.bytes_per_token for group in self.groups)


class KVCacheManager(Protocol):
    """Grants and takes back KV memory within `budget_bytes`."""

    budget_bytes: int

    @property
    def used_bytes(self) -> int:
        """What requests hold."""

    def expect(self, request: Request) -> None:
        """`request` waits, and will be allocated some time."""

    def allocate(self, request: Request) -> bool:
        """Let `request` hold KV for all its tokens; false, and nothing changed, if they do not fit."""

    def trim(self) -> None:
        """Give up memory that is only held to be there for the next request."""

    def free(self, request: Request) -> None:
        """Take back all that `request` holds; harmless if it holds nothing."""

    def max_num_tokens(self, limit: int, budget_bytes: int) -> int:
        """The longest request, up to `limit` tokens, that fits in so much when it is alone."""

    def num_bytes(self, num_tokens: int) -> int:
        """The least budget that a request of so many tokens fits in."""

    def set_budget(self, num_bytes: int) -> None:
        """Grow and keep no further than `num_bytes`; what requests hold by then stays theirs, and the budget
        is as much. Kept prefixes go first.
        """

    def restore(self, request: Request) -> int:
        """Give a newcomer, just allocated, the KV that is kept of its beginning; returns how many tokens."""

    def max_num_new_tokens(self, request: Request) -> int:
        """How many tokens an admitted request may compute until `store` must see it."""

    def store(self, request: Request) -> None:
        """Keep the KV that `request` has computed, if this is a place to, for others that begin alike.

        Called when it has computed some of its prompt, and when it ends.
        """

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether another computes just now what `request` begins with."""


def num_steps(num_tokens: int) -> int:
    """Steps of KV that `num_tokens` tokens take."""
    return -(-num_tokens // KV_STEP)
