"""Lays the tokens of a step out as rows: first those that decode, then prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from vllm_metal.engine.mlx.fused import Chunk, DecodeGroup, Opening, StepShape
from vllm_metal.engine.mlx.static_shapes import StaticShapes
from vllm_metal.engine.mlx.step_tokens import StepTokens
from vllm_metal.engine.request import Request
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager, SlotPool

#: Rows of prompts are rounded up to these, where their shapes are static.
_NUM_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LEAST_KEY_LENGTH = 256
#: Chunks of so many rows are worth a shape of their own: a mask over all their keys costs more than that.
#: Smaller ones begin anywhere, behind kept prefixes, and would seldom meet a shape twice.
LEAST_EXACT = 512
#: Prompts that begin share one attention up to this many rows, since its work grows with their square.
_MOST_PACKED = 2048


class StepPlanner:
    """Rounds up what `static` says."""

    def __init__(self, kv: SlotKVCacheManager, *, static: StaticShapes) -> None:
        self.kv = kv
        self.static = static

    def plan(self, scheduled: dict[Request, int], tokens: StepTokens) -> StepShape:
        """Add the rows of all that is scheduled to `tokens`."""
        groups = tuple(self._groups(scheduled, tokens))
        prompts = [request for request, num_tokens in scheduled.items() if num_tokens > 1]
        beginning = [request for request in prompts if request.num_computed_tokens == 0]
        openings = tuple(
            self._opening(requests, scheduled, tokens) for requests in self._packed(beginning, scheduled)
        )
        chunks = tuple(
            self._chunk(request, scheduled[request], tokens)
            for request in prompts
            if request.num_computed_tokens
        )
        return StepShape(groups, openings, chunks, tokens.have_adapters)

    def _groups(self, scheduled: dict[Request, int], tokens: StepTokens) -> Iterator[DecodeGroup]:
        """One for each pool in which someone decodes: a token row for each slot, in order."""
        for pool in self.kv.pools.values():
            decoding = [request for request in pool.requests if scheduled.get(request) == 1]
            if not decoding:
                continue
            longest = max(request.num_computed_tokens for request in decoding) + 1
            offset = len(tokens)
            num_rows = self._num_decode_rows(pool)
            for slot, request in enumerate(pool.rows[:num_rows]):
                if request is None:
                    tokens.add_idle(0, slot=slot)
                elif scheduled.get(request) == 1:
                    tokens.add(request, request.num_computed_tokens, 1, slot=slot)
                else:
                    # It writes where its next chunk will, or past its end, where nobody looks any more.
                    tokens.add_idle(min(request.num_computed_tokens, pool.capacity - 1), slot=slot)
            yield DecodeGroup(pool.capacity, num_rows, offset, self._key_length(longest, pool.capacity))

    def _num_decode_rows(self, pool: SlotPool) -> int:
        """Rows up to the last that is taken; all of the pool's where idle ones cost little."""
        num_rows = pool.num_leading_rows
        return num_rows if num_rows <= self.static.most_dear_rows else pool.num_slots

    def _packed(self, requests: list[Request], scheduled: dict[Request, int]) -> Iterator[list[Request]]:
        """Those that share an attention: of one pool, as many as fit."""
        most = 0 if self.static is StaticShapes.NONE else _MOST_PACKED
        pack: list[Request] = []
        for request in sorted(requests, key=lambda request: self.kv.slot(request).capacity):
            together = [*pack, request]
            is_one_pool = len({self.kv.slot(each).capacity for each in together}) == 1
            if pack and not (is_one_pool and sum(scheduled[each] for each in together) <= most):
                yield pack
                together = [request]
            pack = together
        if pack:
            yield pack

    def _opening(self, requests: list[Request], scheduled: dict[Request, int], tokens: StepTokens) -> Opening:
        offset = len(tokens)
        for request in requests:
            self._add(request, scheduled[request], tokens)
        num_rows = self._pad(tokens, offset, request, scheduled[request])
        return Opening(self.kv.slot(request).capacity, num_rows, offset, is_packed=len(requests) > 1)

    def _chunk(self, request: Request, num_tokens: int, tokens: StepTokens) -> Chunk:
        offset, capacity = len(tokens), self.kv.slot(request).capacity
        self._add(request, num_tokens, tokens)
        num_rows = self._pad(tokens, offset, request, num_tokens)
        end = request.num_computed_tokens + num_rows
        is_exact = self.static is not StaticShapes.ALL or num_rows >= LEAST_EXACT
        key_length = end if is_exact else self._key_length(end, capacity)
        return Chunk(capacity, num_rows, offset, key_length, is_exact)

    def _add(self, request: Request, num_tokens: int, tokens: StepTokens) -> None:
        tokens.add(request, request.num_computed_tokens, num_tokens, slot=self.kv.slot(request).row)

    def _pad(self, tokens: StepTokens, offset: int, last: Request, num_tokens: int) -> int:
        """Round the rows from `offset` on up to a number that recurs, as far as the last one's slot goes."""
        num_rows = len(tokens) - offset
        if self.static is StaticShapes.ALL and num_rows <= _NUM_ROWS[-1]:
            padding = _NUM_ROWS[bisect_left(_NUM_ROWS, num_rows)] - num_rows
            room = self.kv.slot(last).capacity - last.num_computed_tokens - num_tokens
            tokens.pad(min(padding, room))
        return len(tokens) - offset

    def _key_length(self, num_tokens: int, capacity: int) -> int:
        """Rounded up by at most a quarter."""
        if self.static is StaticShapes.NONE:
            return num_tokens
        step = max(_LEAST_KEY_LENGTH, 1 << max(0, num_tokens.bit_length() - 3))
        return min(-(-num_tokens // step) * step, capacity)
