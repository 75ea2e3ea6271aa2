"""KV of a left-padded decode batch, and whole states of requests gone by. Holds no array."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_metal.engine.blocks import BLOCK_SIZE, BlockDigests
from vllm_metal.engine.kv_cache_manager import PREFIX_SHARE, KVCacheSpec, num_steps
from vllm_metal.engine.prefixes_under_way import PrefixesUnderWay
from vllm_metal.engine.request import Request
from vllm_metal.engine.snapshot_cache import SnapshotCache

#: Tokens at a prompt's end that the next turn may write in another way: those that ask for the answer.
_RERENDERED = 16
#: Tokens between the snapshots within a long prompt; doubled where that many would take too much memory.
_SPACING = 1024
#: Most of what may be kept that the snapshots within one prompt take.
_INNER_SHARE = 1 / 4


class Store(NamedTuple):
    """Copy the state of `request` as it is to a new snapshot."""

    snapshot_id: int
    request: Request


class Restore(NamedTuple):
    """Let `request`, which has none yet, go on from a snapshot's state."""

    snapshot_id: int
    request: Request


class Free(NamedTuple):
    """Forget the state of `request`."""

    request: Request


class Drop(NamedTuple):
    """Forget a snapshot."""

    snapshot_id: int


Change = Store | Restore | Free | Drop


@dataclass(slots=True)
class _Seat:
    """A request's tokens, the position where it began or was last kept, and those where it is to be kept."""

    num_tokens: int
    kept_at: int = 0
    stops: list[int] = field(default_factory=list)


class RectangularKVCacheManager:
    """Grants KV within `budget_bytes` as a rectangle: every row costs as much as the longest.

    `take_changes` gives what the runner must do to its arrays, in order, before it computes the next step.
    Memory that no request needs keeps states of requests gone by, where the next one may well go on: a block
    or so before a prompt's end, at an answer's end, where two texts part, and here and there within a long
    prompt. A request's snapshots are at least a block apart.
    """

    def __init__(self, spec: KVCacheSpec, budget_bytes: int) -> None:
        self.spec = spec
        self.budget_bytes = budget_bytes
        self._seats: dict[Request, _Seat] = {}
        self._changes: list[Change] = []
        self._digests = BlockDigests()
        self._under_way = PrefixesUnderWay(self._digests)
        self.snapshots = SnapshotCache(self._digests)

    @property
    def used_bytes(self) -> int:
        longest = max((seat.num_tokens for seat in self._seats.values()), default=0)
        return len(self._seats) * self.spec.num_bytes(longest)

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def allocate(self, request: Request) -> bool:
        seat = self._seats.get(request)
        # Most decodes stay within their step, and need no look at all the others.
        if seat is None or num_steps(seat.num_tokens) != num_steps(request.num_tokens):
            longest = max([request.num_tokens, *(each.num_tokens for each in self._seats.values())])
            num_bytes = (len(self._seats) + (seat is None)) * self.spec.num_bytes(longest)
            if num_bytes > self.budget_bytes:
                return False
            self._shrink_snapshots(self.budget_bytes - num_bytes)
        if seat is None:
            seat = self._seats[request] = _Seat(request.num_tokens)
        seat.num_tokens = request.num_tokens
        return True

    def trim(self) -> None:
        pass

    def free(self, request: Request) -> None:
        self._under_way.end(request)
        self._digests.forget(request)
        if self._seats.pop(request, None) is not None:
            self._changes.append(Free(request))

    def max_num_tokens(self, limit: int, budget_bytes: int) -> int:
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.spec.num_bytes(middle) <= budget_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def num_bytes(self, num_tokens: int) -> int:
        return self.spec.num_bytes(num_tokens)

    def set_budget(self, num_bytes: int) -> None:
        self.budget_bytes = max(num_bytes, self.used_bytes)
        self._shrink_snapshots(self._most_free_bytes)

    def expect(self, request: Request) -> None:
        if not request.params.reads_prefix_cache:
            return
        self._under_way.expect(request)
        shared = self._under_way.find(request)
        if shared is not None and self._fits(shared.end):
            stops = self._seats[shared.request].stops
            if shared.end not in stops:
                insort(stops, shared.end)

    def restore(self, request: Request) -> int:
        seat = self._seats[request]
        snapshot = self.snapshots.match(request) if request.params.reads_prefix_cache else None
        if snapshot is not None:
            self._changes.append(Restore(snapshot.snapshot_id, request))
            seat.kept_at = snapshot.num_tokens
        self._under_way.begin(request, seat.kept_at)
        seat.stops = self._plan(request, seat.kept_at)
        return seat.kept_at

    def max_num_new_tokens(self, request: Request) -> int:
        stops = self._seats[request].stops
        return stops[0] - request.num_computed_tokens if stops else request.num_remaining_tokens

    def store(self, request: Request) -> None:
        seat, num_tokens = self._seats[request], request.num_computed_tokens
        if seat.stops and seat.stops[0] == num_tokens:
            del seat.stops[0]
            self._keep(request, num_tokens)
        elif num_tokens > request.num_prompt_tokens and num_tokens - seat.kept_at >= BLOCK_SIZE:
            self._keep(request, num_tokens)
        self._under_way.end(request, num_tokens if num_tokens < request.num_prompt_tokens else None)

    def is_worth_waiting(self, request: Request) -> bool:
        shared = self._under_way.find(request) if request.params.reads_prefix_cache else None
        if shared is None:
            return False
        stops = self._seats[shared.request].stops
        return bool(stops) and stops[0] <= shared.end

    def forget_prefixes(self) -> None:
        """Drop all that is kept of requests gone by."""
        self._shrink_snapshots(0)

    def _plan(self, request: Request, start: int) -> list[int]:
        """Where to keep the state of a prompt that is computed from token `start` on."""
        end = _whole_blocks(request.num_prompt_tokens - 1 - _RERENDERED)
        parting = min(self.snapshots.num_shared_tokens(request), end)
        spacing = _SPACING
        while self._total_bytes(range(spacing, end, spacing)) > _INNER_SHARE * self._most_bytes:
            spacing *= 2
        stops = {end, parting, *self._under_way.partings(request), *range(spacing, end, spacing)}
        return sorted(stop for stop in stops if stop - start >= BLOCK_SIZE and self._fits(stop))

    def _keep(self, request: Request, num_tokens: int) -> None:
        self._seats[request].kept_at = num_tokens
        if not self._fits(num_tokens):
            return
        snapshot_id = self.snapshots.add(request, num_tokens, self.spec.exact_bytes(num_tokens))
        if snapshot_id is not None:
            self._changes.append(Store(snapshot_id, request))
            self._shrink_snapshots(self._most_free_bytes)

    def _fits(self, num_tokens: int) -> bool:
        """Whether a snapshot of so many tokens may be kept, were it the only one."""
        return self.spec.exact_bytes(num_tokens) <= self._most_free_bytes

    @property
    def _most_bytes(self) -> int:
        return int(PREFIX_SHARE * self.budget_bytes)

    @property
    def _most_free_bytes(self) -> int:
        return min(self._most_bytes, self.budget_bytes - self.used_bytes)

    def _total_bytes(self, positions: range) -> int:
        return sum(map(self.spec.exact_bytes, positions))

    def _shrink_snapshots(self, num_bytes: int) -> None:
        self.snapshots.shrink(num_bytes)
        self._changes += map(Drop, self.snapshots.take_dropped())

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        assert self.used_bytes + self.snapshots.num_bytes <= self.budget_bytes


def _whole_blocks(num_tokens: int) -> int:
    return max(num_tokens, 0) // BLOCK_SIZE * BLOCK_SIZE
