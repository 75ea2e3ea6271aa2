"""KV of prompts and answers gone by, for prompts that begin alike. Decides what is kept; holds no array.

Kept text is a tree of blocks of tokens; behind a prompt's last whole one comes its tail, a shorter one.
Blocks stored together are one segment, one copy of KV: what is kept and dropped. The least recently used
segment goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from vllm_metal.engine.blocks import BLOCK_SIZE, blocks
from vllm_metal.engine.request import Request


class Span(NamedTuple):
    """`num_tokens` tokens of a request from position `start` on, at `offset` in a segment."""

    segment_id: int
    offset: int
    start: int
    num_tokens: int


class _Block(NamedTuple):
    """A block's own id, by which its successors know it, and where it is."""

    block_id: int
    segment_id: int
    offset: int


#: A block is known by its tokens and the block before it, compared in full: no text can be taken for another.
_Key = tuple[object, tuple[int, ...]]


class PrefixCache:
    """`take_dropped` gives the segments that went, for whoever holds their arrays."""

    def __init__(self, bytes_per_token: int) -> None:
        self._block_bytes = BLOCK_SIZE * bytes_per_token
        self._blocks: dict[_Key, _Block] = {}
        self._segments: OrderedDict[int, list[_Key]] = OrderedDict()
        self._ids = count()
        self._dropped: list[int] = []

    @property
    def num_bytes(self) -> int:
        # A tail counts as a whole block, or prompts that differ in their last words alone would make any
        # number of tiny arrays within the budget.
        return len(self._blocks) * self._block_bytes

    def match(self, request: Request) -> list[Span]:
        """What is kept of the beginning of `request`, short of its last token; marks it as used."""
        spans: list[Span] = []
        parent: object = ("root", request.kv_salt)
        for start, tokens in _blocks_and_tail(request, request.num_tokens):
            block = self._blocks.get((parent, tokens))
            if block is None:
                break
            parent = block.block_id
            last = spans[-1] if spans else None
            follows = last is not None and last.offset + last.num_tokens == block.offset
            if last and follows and last.segment_id == block.segment_id:
                spans[-1] = last._replace(num_tokens=last.num_tokens + len(tokens))
            else:
                spans.append(Span(block.segment_id, block.offset, start, len(tokens)))
        # What comes later in a text is worth nothing without what comes before, so it goes first.
        for span in reversed(spans):
            self._segments.move_to_end(span.segment_id)
        if spans and spans[-1].start + spans[-1].num_tokens == request.num_tokens:
            spans[-1] = spans[-1]._replace(num_tokens=spans[-1].num_tokens - 1)
        return spans

    def store(self, request: Request, num_tokens: int) -> Span | None:
        """Keep the whole blocks among the first `num_tokens` tokens, and the tail if the prompt ends there.

        The span says which of them are new.
        """
        # Not an answer's tail: the next turn goes on beyond it, and nobody asks for just that text again.
        is_prompt = num_tokens == request.num_prompt_tokens
        parent: object = ("root", request.kv_salt)
        segment_id = next(self._ids)
        new: list[_Key] = []
        begin = end = 0
        for start, tokens in (_blocks_and_tail if is_prompt else blocks)(request, num_tokens):
            key = (parent, tokens)
            block = self._blocks.get(key)
            if block is None:  # Nor is any that follows it, since those would know it by its id.
                if not new:
                    begin = start
                end = start + len(tokens)
                block = self._blocks[key] = _Block(next(self._ids), segment_id, start - begin)
                new.append(key)
            parent = block.block_id
        if not new:
            return None
        self._segments[segment_id] = new
        return Span(segment_id, 0, begin, end - begin)

    def shrink(self, num_bytes: int) -> None:
        """Drop segments until at most `num_bytes` are kept."""
        while self._segments and self.num_bytes > num_bytes:
            segment_id, keys = self._segments.popitem(last=False)
            for key in keys:
                del self._blocks[key]
            self._dropped.append(segment_id)

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        keys = [key for segment in self._segments.values() for key in segment]
        assert len(keys) == len(self._blocks)
        assert set(keys) == self._blocks.keys()


def _blocks_and_tail(request: Request, num_tokens: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The whole blocks among the first `num_tokens` tokens, and what is left behind the last of them.

    The last token is part of that tail, though it is always computed: so only the very same text finds it,
    and one that goes on begins at a block's border, as few positions as a device may have to compile
    attention for. A last token alone is no tail, nor is a text without a block: a small step either way.
    """
    yield from blocks(request, num_tokens)
    start = num_tokens // BLOCK_SIZE * BLOCK_SIZE
    if start and num_tokens - start > 1:
        yield start, tuple(request.token_ids[start:num_tokens])
