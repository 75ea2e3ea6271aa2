"""KV in slots: a pool a capacity, each request a row of one pool. Decides who sits where; holds no array."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from vllm_metal.engine.blocks import BlockDigests
from vllm_metal.engine.kv_cache_manager import PREFIX_SHARE, KVCacheSpec
from vllm_metal.engine.prefix_cache import PrefixCache
from vllm_metal.engine.prefixes_under_way import PrefixesUnderWay
from vllm_metal.engine.request import Request

#: A pool has one of these numbers of slots, so that steps come in few shapes.
SLOT_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
#: Capacities double from the first of these on, in tokens, for which there is memory enough.
SMALLEST_CAPACITIES = (2048, 1024, 512)
#: Tokens of answer that a new request gets room for, so that a short one never has to move.
HEADROOM = 256


class Slot(NamedTuple):
    """Row `row` of the pool of `capacity` tokens."""

    capacity: int
    row: int


class Resize(NamedTuple):
    """Give the pool of `capacity` `num_slots` slots. Those that stay keep their KV."""

    capacity: int
    num_slots: int


class Move(NamedTuple):
    """Copy the KV of `source` to `target`."""

    source: Slot
    target: Slot


class Store(NamedTuple):
    """Copy `num_tokens` tokens of KV from position `start` of `slot` to a new segment."""

    segment_id: int
    slot: Slot
    start: int
    num_tokens: int


class Restore(NamedTuple):
    """Copy `num_tokens` tokens of a segment's KV from `offset` on to position `start` of `slot`."""

    segment_id: int
    offset: int
    slot: Slot
    start: int
    num_tokens: int


class Drop(NamedTuple):
    """Forget a segment."""

    segment_id: int


Change = Resize | Move | Store | Restore | Drop


class SlotPool:
    """A request a row; None where a row is free."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Request | None] = []

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    @property
    def requests(self) -> list[Request]:
        return [request for request in self.rows if request is not None]

    @property
    def num_leading_rows(self) -> int:
        """Rows up to the last that is taken."""
        return max((row + 1 for row, request in enumerate(self.rows) if request is not None), default=0)


class SlotKVCacheManager:
    """Grants slots within `budget_bytes`.

    A request that outgrows its slot moves to the next larger pool. A leaver's row stays free until someone
    joins; where at most `most_packed` are left, for idle rows are dear, the last one moves into it at once.
    Of a pool that all have left one slot stays, as long as there is room. With `compact`, for the CPU, where
    fresh memory is dear, slots begin at the smallest capacity. `take_changes` gives what the runner must do
    to its arrays, in order, before it computes the next step. Memory that no request needs keeps the KV of
    requests gone by.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        budget_bytes: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        compact: bool = False,
        most_packed: int = 0,
    ) -> None:
        self.spec = spec
        self.budget_bytes = budget_bytes
        self.most_packed = most_packed
        roomy = [
            capacity
            for capacity in SMALLEST_CAPACITIES
            if max_num_seqs * capacity * spec.bytes_per_token <= budget_bytes // 2 and not compact
        ]
        capacities = [roomy[0] if roomy else SMALLEST_CAPACITIES[-1]]
        while capacities[-1] < max_model_len:
            capacities.append(2 * capacities[-1])
        self.pools = {capacity: SlotPool(capacity) for capacity in capacities}
        self._capacities = capacities
        self._slots: dict[Request, Slot] = {}
        self._changes: list[Change] = []
        self.prefixes = PrefixCache(spec.bytes_per_token)
        self._digests = BlockDigests()
        self._under_way = PrefixesUnderWay(self._digests)

    @property
    def used_bytes(self) -> int:
        return sum(self._bytes(pool, pool.num_slots) for pool in self.pools.values() if pool.requests)

    @property
    def held_bytes(self) -> int:
        """Slots that wait for the next request included."""
        return sum(self._bytes(pool, pool.num_slots) for pool in self.pools.values())

    def slot(self, request: Request) -> Slot:
        return self._slots[request]

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def expect(self, request: Request) -> None:
        pass

    def allocate(self, request: Request) -> bool:
        held = self._slots.get(request)
        if held is not None and request.num_tokens <= held.capacity:
            return True
        pool = self._pool_with_room(request)
        if pool is None:
            return False
        held = self._slots.get(request)  # making room may have moved it
        target = Slot(pool.capacity, pool.rows.index(None))
        pool.rows[target.row] = request
        if held is not None:
            self._changes.append(Move(held, target))
            self._leave(held)
        self._slots[request] = target
        return True

    def restore(self, request: Request) -> int:
        if not request.params.reads_prefix_cache:
            return 0
        slot = self._slots[request]
        spans = self.prefixes.match(request)
        self._changes += [
            Restore(span.segment_id, span.offset, slot, span.start, span.num_tokens) for span in spans
        ]
        num_tokens = sum(span.num_tokens for span in spans)
        self._under_way.begin(request, num_tokens)
        return num_tokens

    def max_num_new_tokens(self, request: Request) -> int:
        return request.num_remaining_tokens

    def store(self, request: Request) -> None:
        if request.num_computed_tokens < request.num_prompt_tokens:
            return
        self._under_way.end(request)
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        span = self.prefixes.store(request, num_tokens)
        if span is not None:
            self._changes.append(Store(span.segment_id, self._slots[request], span.start, span.num_tokens))
            self._make_room(0)
            self._shrink_prefixes(self._most_prefix_bytes)

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether waiting for the other one's whole prompt is less work than computing the same again."""
        shared = self._under_way.find(request) if request.params.reads_prefix_cache else None
        if shared is None:
            return False
        other = shared.request
        return 2 * shared.num_tokens >= other.num_prompt_tokens - other.num_computed_tokens

    def forget_prefixes(self) -> None:
        """Drop all that is kept of requests gone by."""
        self._shrink_prefixes(0)

    def trim(self) -> None:
        for pool in self.pools.values():
            if not pool.requests:
                self._resize(pool, 0)

    def free(self, request: Request) -> None:
        self._under_way.end(request)
        self._digests.forget(request)
        if (held := self._slots.pop(request, None)) is not None:
            self._leave(held)

    def max_num_tokens(self, limit: int, budget_bytes: int) -> int:
        fitting = [
            capacity for capacity in self._capacities if capacity * self.spec.bytes_per_token <= budget_bytes
        ]
        return min(limit, fitting[-1]) if fitting else 0

    def num_bytes(self, num_tokens: int) -> int:
        index = min(bisect_left(self._capacities, num_tokens), len(self._capacities) - 1)
        return self._capacities[index] * self.spec.bytes_per_token

    def set_budget(self, num_bytes: int) -> None:
        if num_bytes < self.held_bytes:
            for pool in self.pools.values():
                self._resize(pool, len(pool.requests))
        self.budget_bytes = max(num_bytes, self.used_bytes)
        self._shrink_prefixes(self._most_prefix_bytes)

    def _pool_with_room(self, request: Request) -> SlotPool | None:
        """A pool with a free slot, made if it must be: one with headroom if that fits."""
        headroom = max(0, min(request.max_tokens - request.num_sampled_tokens, HEADROOM))
        for num_tokens in (request.num_tokens + headroom, request.num_tokens):
            index = min(bisect_left(self._capacities, num_tokens), len(self._capacities) - 1)
            pool = self.pools[self._capacities[index]]
            if None in pool.rows or self._grow(pool):
                return pool
        return None

    def _leave(self, slot: Slot) -> None:
        pool = self.pools[slot.capacity]
        pool.rows[slot.row] = None
        num_requests = len(pool.requests)
        if num_requests <= self.most_packed:
            self._pack(pool)
        # Every slot takes part in every decode, and shrinking copies those that stay: so not too soon.
        if 4 * num_requests <= pool.num_slots:
            self._resize(pool, _slot_count(max(1, 2 * num_requests)))

    def _grow(self, pool: SlotPool) -> bool:
        """One slot more at least; many at once if there is room, so that growing is rare."""
        for give_back in (False, True):
            if give_back:
                self._give_back(pool)
            for num_slots in (_slot_count(pool.num_slots + 1), pool.num_slots + 1):
                more_bytes = self._bytes(pool, num_slots - pool.num_slots)
                self._make_room(more_bytes)
                num_bytes = self.held_bytes + more_bytes
                if num_bytes <= self.budget_bytes:
                    self._shrink_prefixes(self.budget_bytes - num_bytes)
                    self._resize(pool, num_slots)
                    return True
        return False

    def _make_room(self, num_bytes: int) -> None:
        """Drop slots that only wait, unless so much more fits beside them and all that is kept."""
        if self.held_bytes + self.prefixes.num_bytes + num_bytes > self.budget_bytes:
            self.trim()

    def _give_back(self, wanting: SlotPool) -> None:
        for pool in self.pools.values():
            if pool is not wanting:
                self._resize(pool, len(pool.requests))

    def _resize(self, pool: SlotPool, num_slots: int) -> None:
        if num_slots < pool.num_slots:
            self._pack(pool)
        elif num_slots == pool.num_slots:
            return
        pool.rows = (pool.rows + [None] * num_slots)[:num_slots]
        self._changes.append(Resize(pool.capacity, num_slots))

    def _pack(self, pool: SlotPool) -> None:
        """Move the last requests into the free rows before them."""
        while (row := pool.rows.index(None) if None in pool.rows else pool.num_slots) < pool.num_leading_rows:
            last_row = pool.num_leading_rows - 1
            last = pool.rows[last_row]
            assert last is not None
            pool.rows[row], pool.rows[last_row] = last, None
            self._slots[last] = Slot(pool.capacity, row)
            self._changes.append(Move(Slot(pool.capacity, last_row), Slot(pool.capacity, row)))

    @property
    def _most_prefix_bytes(self) -> int:
        return min(int(PREFIX_SHARE * self.budget_bytes), self.budget_bytes - self.held_bytes)

    def _shrink_prefixes(self, num_bytes: int) -> None:
        self.prefixes.shrink(num_bytes)
        self._changes += map(Drop, self.prefixes.take_dropped())

    def _bytes(self, pool: SlotPool, num_slots: int) -> int:
        return num_slots * pool.capacity * self.spec.bytes_per_token

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        seated = {
            request: Slot(pool.capacity, row)
            for pool in self.pools.values()
            for row, request in enumerate(pool.rows)
            if request is not None
        }
        assert seated == self._slots
        assert self.held_bytes + self.prefixes.num_bytes <= self.budget_bytes
        self.prefixes.check()


def _slot_count(num_requests: int) -> int:
    """The smallest of SLOT_COUNTS that holds `num_requests`."""
    return SLOT_COUNTS[bisect_left(SLOT_COUNTS, num_requests)]
