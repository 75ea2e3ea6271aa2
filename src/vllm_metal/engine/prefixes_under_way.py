"""Who computes which beginnings, now or soon, so that others that begin alike can wait and share them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from vllm_metal.engine.blocks import BLOCK_SIZE, BlockDigests
from vllm_metal.engine.request import Request


class Shared(NamedTuple):
    """`request` has yet to compute `num_tokens` tokens up to position `end` with which another begins too."""

    request: Request
    num_tokens: int
    end: int


class PrefixesUnderWay:
    """Each block that is being computed has one request that computes it. The last token is never shared."""

    def __init__(self, digests: BlockDigests) -> None:
        self._digests = digests
        self._computing: dict[int, Request] = {}
        self._begun: dict[Request, list[int]] = {}
        self._expected: dict[Request, list[int]] = {}
        self._num_expected: Counter[int] = Counter()

    def expect(self, request: Request) -> None:
        """`request` will begin some time."""
        self._expected[request] = self._sharable(request)
        self._num_expected.update(self._expected[request])

    def begin(self, request: Request, num_restored: int) -> None:
        """`request` is about to compute its blocks from token `num_restored` on."""
        self._expect_no_more(request)
        self._begun[request] = list(self._digests.of(request))
        for digest in self._begun[request][num_restored // BLOCK_SIZE :]:
            holder = self._computing.setdefault(digest, request)
            if request.params.priority < holder.params.priority:
                self._computing[digest] = request

    def end(self, request: Request, num_tokens: int | None = None) -> None:
        """What `request` computes of its first `num_tokens` tokens, or of all, is kept by now or never will.

        Harmless when repeated.
        """
        num_blocks = None if num_tokens is None else num_tokens // BLOCK_SIZE
        for digest in self._begun.get(request, ())[:num_blocks]:
            if self._computing.get(digest) is request:
                del self._computing[digest]
        if num_blocks is None:
            self._begun.pop(request, None)
            self._expect_no_more(request)

    def find(self, request: Request) -> Shared | None:
        """Who computes just now what `request` begins with: nobody of lower priority, whom others hold up."""
        if not self._computing:
            return None
        shared: Shared | None = None
        for index, digest in enumerate(self._sharable(request), 1):
            holder = self._computing.get(digest)
            if holder is not None and holder.params.priority <= request.params.priority:
                num_tokens = shared.num_tokens if shared else 0
                shared = Shared(holder, num_tokens + BLOCK_SIZE, index * BLOCK_SIZE)
            elif shared is not None:
                break
        return shared

    def partings(self, request: Request) -> list[int]:
        """The positions up to which, and not further, someone who is expected begins like `request`."""
        counts = [self._num_expected[digest] for digest in self._digests.of(request)]
        following = [*counts, 0][1:]
        return [
            index * BLOCK_SIZE
            for index, (here, there) in enumerate(zip(counts, following, strict=True), 1)
            if here > there
        ]

    def _sharable(self, request: Request) -> list[int]:
        return self._digests.of(request)[: (request.num_tokens - 1) // BLOCK_SIZE]

    def _expect_no_more(self, request: Request) -> None:
        for digest in self._expected.pop(request, ()):
            self._num_expected[digest] -= 1
            if not self._num_expected[digest]:
                del self._num_expected[digest]
