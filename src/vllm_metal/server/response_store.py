"""Responses that are kept, for their own clients to read and to go on with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from vllm_metal.api.response_items import InputItem, as_input
from vllm_metal.api.responses import Response
from vllm_metal.errors import ResponseNotFound

MAX_COUNT = 4096
MAX_BYTES = 64 << 20
LIFE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """`input` holds all items that came before the answer, those of earlier responses included."""

    response: Response
    input: Sequence[InputItem]
    output: Sequence[InputItem]
    num_bytes: int
    kept_since_s: float


class ResponseStore:
    """In memory. The oldest are given up for new ones, and each after its life.

    A response belongs to an owner; to others it does not exist. A conversation counts in full with each of
    its responses, although they share what they have in common.
    """

    def __init__(
        self,
        *,
        max_count: int = MAX_COUNT,
        max_bytes: int = MAX_BYTES,
        life_s: float = LIFE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._life_s = life_s
        self._now = now
        self._kept: dict[tuple[str, str], KeptResponse] = {}
        self._items: dict[tuple[str, str], InputItem] = {}
        self._num_bytes = 0

    def put(self, owner: str, response: Response, input: Sequence[InputItem]) -> None:
        num_bytes = len(msgspec.json.encode((response, input)))
        if num_bytes > self._max_bytes:
            return
        kept = KeptResponse(response, input, as_input(response.output), num_bytes, self._now())
        self._kept[owner, response.id] = kept
        self._items |= {(owner, item.id): item for item in kept.output if item.id}
        self._num_bytes += num_bytes
        self._drop_expired()
        while len(self._kept) > self._max_count or self._num_bytes > self._max_bytes:
            self._drop(*next(iter(self._kept)))

    def get(self, owner: str, response_id: str, *, param: str = "response_id") -> KeptResponse:
        """Raises ResponseNotFound."""
        self._drop_expired()
        kept = self._kept.get((owner, response_id))
        if kept is None:
            raise ResponseNotFound(
                f"no response `{response_id}` is kept here",
                param=param,
                hint="responses are kept in memory, for a day at most, and only if `store` is true",
            )
        return kept

    def item(self, owner: str, item_id: str, *, param: str) -> InputItem:
        """An item of an answer. Raises ResponseNotFound."""
        self._drop_expired()
        item = self._items.get((owner, item_id))
        if item is None:
            raise ResponseNotFound(f"no item `{item_id}` is kept here", param=param)
        return item

    def delete(self, owner: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(owner, response_id)
        self._drop(owner, response_id)

    def _drop_expired(self) -> None:
        latest_s = self._now() - self._life_s
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.kept_since_s > latest_s:
                return
            self._drop(*key)

    def _drop(self, owner: str, response_id: str) -> None:
        kept = self._kept.pop((owner, response_id))
        self._num_bytes -= kept.num_bytes
        for item in kept.output:
            self._items.pop((owner, item.id or ""), None)
