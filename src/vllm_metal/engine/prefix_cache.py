"""KV of prompts and answers gone by, for prompts that begin alike. Decides what is kept; holds no array.

Kept text is a tree of blocks of tokens. Blocks stored together are one segment, one copy of KV: what is kept
and dropped. The least recently used segment goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class _Segment:
    segment_id: int
    num_tokens: int
    blocks: list[_Key] = field(default_factory=list)


class _Block(NamedTuple):
    """A block's own id, by which its successors know it, and where it is."""

    block_id: int
    segment: _Segment
    offset: int


#: A block is known by its tokens and the block before it, compared in full: no text can be taken for another.
_Key = tuple[object, tuple[int, ...]]


class PrefixCache:
    """`take_dropped` gives the segments that went, for whoever holds their arrays."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._num_tokens = 0
        self._blocks: dict[_Key, _Block] = {}
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._ids = count()
        self._dropped: list[int] = []

    @property
    def num_bytes(self) -> int:
        return self._num_tokens * self._bytes_per_token

    def match(self, request: Request) -> list[Span]:
        """What is kept of the beginning of `request`, short of its last token; marks it as used."""
        spans: list[Span] = []
        used: list[int] = []
        parent: object = ("root", request.kv_salt)
        for start, tokens in blocks(request, request.num_tokens - 1):
            block = self._blocks.get((parent, tokens))
            if block is None:
                break
            parent = block.block_id
            last = spans[-1] if spans else None
            follows = last is not None and last.offset + last.num_tokens == block.offset
            if last and follows and last.segment_id == block.segment.segment_id:
                spans[-1] = last._replace(num_tokens=last.num_tokens + BLOCK_SIZE)
            else:
                spans.append(Span(block.segment.segment_id, block.offset, start, BLOCK_SIZE))
                used.append(block.segment.segment_id)
        # What comes later in a text is worth nothing without what comes before, so it goes first.
        for segment_id in reversed(used):
            self._segments.move_to_end(segment_id)
        return spans

    def store(self, request: Request, num_tokens: int) -> Span | None:
        """Keep the whole blocks among the first `num_tokens` tokens; the span says which of them are new."""
        parent: object = ("root", request.kv_salt)
        segment: _Segment | None = None
        begin = 0
        for start, tokens in blocks(request, num_tokens):
            key = (parent, tokens)
            block = self._blocks.get(key)
            if block is None:
                if segment is None:
                    segment, begin = _Segment(next(self._ids), 0), start
                block = _Block(next(self._ids), segment, start - begin)
                self._blocks[key] = block
                segment.blocks.append(key)
                segment.num_tokens += BLOCK_SIZE
            elif segment is not None:
                break  # a gap that was dropped has been filled; what follows is here already
            parent = block.block_id
        if segment is None:
            return None
        self._segments[segment.segment_id] = segment
        self._num_tokens += segment.num_tokens
        return Span(segment.segment_id, 0, begin, segment.num_tokens)

    def shrink(self, num_bytes: int) -> None:
        """Drop segments until at most `num_bytes` are kept."""
        while self._segments and self.num_bytes > num_bytes:
            _, segment = self._segments.popitem(last=False)
            self._num_tokens -= segment.num_tokens
            for key in segment.blocks:
                del self._blocks[key]
            self._dropped.append(segment.segment_id)

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped
