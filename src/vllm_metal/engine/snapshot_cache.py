"""States of requests gone by, for prompts that go on from them. Decides what is kept; holds no array.

A recurrent state cannot be cut back: it serves only texts that begin with all that it has seen. The least
recently used one goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from itertools import count

from vllm_metal.engine.blocks import BLOCK_SIZE, BlockDigests
from vllm_metal.engine.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The state behind `token_ids`, a block of them or more."""

    snapshot_id: int
    kv_salt: tuple[str | None, int]
    token_ids: tuple[int, ...]
    digests: tuple[int, ...]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def begins(self, request: Request) -> bool:
        """Compared in full: no text can be taken for another."""
        return self.kv_salt == request.kv_salt and self.token_ids == tuple(
            request.token_ids[: self.num_tokens]
        )


class SnapshotCache:
    """`take_dropped` gives the snapshots that went, for whoever holds their arrays."""

    def __init__(self, digests: BlockDigests) -> None:
        self._digests = digests
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self._by_last_digest: dict[int, list[Snapshot]] = defaultdict(list)
        self._num_begun_so: Counter[int] = Counter()
        self._ids = count()
        self._dropped: list[int] = []
        self.num_bytes = 0

    def match(self, request: Request) -> Snapshot | None:
        """The longest that begins `request`, short of its last token; marks it as used."""
        for digest in reversed(self._digests.of(request)):
            fitting = [
                snapshot
                for snapshot in self._by_last_digest.get(digest, ())
                if snapshot.num_tokens < request.num_tokens and snapshot.begins(request)
            ]
            if fitting:
                longest = max(fitting, key=lambda snapshot: snapshot.num_tokens)
                self._snapshots.move_to_end(longest.snapshot_id)
                return longest
        return None

    def num_shared_tokens(self, request: Request) -> int:
        """As far as any kept text begins like `request`, in whole blocks, with a state there or without."""
        num_blocks = 0
        for digest in self._digests.of(request):
            if digest not in self._num_begun_so:
                break
            num_blocks += 1
        return num_blocks * BLOCK_SIZE

    def add(self, request: Request, num_tokens: int, num_bytes: int) -> int | None:
        """The id of a new snapshot behind `num_tokens` tokens; None if there is one, which counts as used."""
        digests = tuple(self._digests.of(request)[: num_tokens // BLOCK_SIZE])
        snapshots = self._by_last_digest[digests[-1]]
        for snapshot in snapshots:
            if snapshot.num_tokens == num_tokens and snapshot.begins(request):
                self._snapshots.move_to_end(snapshot.snapshot_id)
                return None
        token_ids = tuple(request.token_ids[:num_tokens])
        snapshot = Snapshot(next(self._ids), request.kv_salt, token_ids, digests, num_bytes)
        snapshots.append(snapshot)
        self._snapshots[snapshot.snapshot_id] = snapshot
        self._num_begun_so.update(digests)
        self.num_bytes += num_bytes
        return snapshot.snapshot_id

    def shrink(self, num_bytes: int) -> None:
        """Drop snapshots until at most `num_bytes` are kept."""
        while self._snapshots and self.num_bytes > num_bytes:
            _, snapshot = self._snapshots.popitem(last=False)
            self.num_bytes -= snapshot.num_bytes
            same = self._by_last_digest[snapshot.digests[-1]]
            same.remove(snapshot)
            if not same:
                del self._by_last_digest[snapshot.digests[-1]]
            # A Counter keeps what it counts down to zero.
            self._num_begun_so.subtract(snapshot.digests)
            for digest in snapshot.digests:
                if not self._num_begun_so[digest]:
                    del self._num_begun_so[digest]
            self._dropped.append(snapshot.snapshot_id)

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped
