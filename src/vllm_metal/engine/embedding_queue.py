"""Which inputs make the next batch: those of about one length, of the request with the least left to do."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from vllm_metal.engine.embedding_request import EmbeddingRequest

#: Inputs that are shorter are padded to this length: they cost as much.
_LEAST_LENGTH = 8
#: For each so many tokens that have overtaken a request, it counts as one token shorter.
_AGEING = 4


def padded_length(num_tokens: int) -> int:
    """To what length an input is padded: at most a quarter more, so that few lengths are in use."""
    unit = max(_LEAST_LENGTH, 1 << max(num_tokens.bit_length() - 3, 0))
    return -(-num_tokens // unit) * unit


@dataclass(slots=True, eq=False)
class Pending:
    """A request that has inputs in the queue: their positions in it, by padded length."""

    request: EmbeddingRequest
    num_taken_before: int
    positions: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_remaining_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The place of one input in a batch."""

    request: EmbeddingRequest
    position: int


class EmbeddingQueue:
    """Requests with the fewest tokens left come first. Waiting makes them count for less, so that a long
    request is overtaken by a few times its own length at most.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}
        self._num_tokens_taken = 0

    def __len__(self) -> int:
        """Requests that have inputs here."""
        return len(self._pending)

    @property
    def next_length(self) -> int | None:
        """The padded length of what is taken next."""
        if not self._pending:
            return None
        return min(min(self._pending.values(), key=self._rank).positions)

    def add(self, request: EmbeddingRequest) -> None:
        pending = Pending(request, self._num_tokens_taken)
        # From the last, since they are taken from the end.
        for position in reversed(range(len(request.inputs))):
            length = padded_length(len(request.inputs[position].token_ids))
            pending.positions[length].append(position)
            pending.num_remaining_tokens += length
        self._pending[request.request_id] = pending

    def discard(self, request_id: str) -> None:
        self._pending.pop(request_id, None)

    def take(self, max_tokens: int) -> list[Row]:
        """The next batch: of one padded length, `max_tokens` in all, or a single input that is longer."""
        if not self._pending:
            return []
        in_order = sorted(self._pending.values(), key=self._rank)
        length = min(in_order[0].positions)
        num_rows = max(1, max_tokens // length)
        rows: list[Row] = []
        for pending in in_order:
            rows += self._take_from(pending, length, num_rows - len(rows))
            if len(rows) == num_rows:
                break
        self._num_tokens_taken += length * len(rows)
        return rows

    def _rank(self, pending: Pending) -> int:
        overtaken_by = self._num_tokens_taken - pending.num_taken_before
        return pending.num_remaining_tokens - overtaken_by // _AGEING

    def _take_from(self, pending: Pending, length: int, most: int) -> list[Row]:
        if length not in pending.positions:
            return []
        positions = pending.positions[length]
        rows = [Row(pending.request, positions.pop()) for _ in range(min(most, len(positions)))]
        pending.num_remaining_tokens -= length * len(rows)
        pending.num_taken_before += length * len(rows)  # its own have not overtaken it
        if not positions:
            del pending.positions[length]
        if not pending.positions:
            del self._pending[pending.request.request_id]
        return rows
