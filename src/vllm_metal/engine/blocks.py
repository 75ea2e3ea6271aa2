"""Texts in blocks of tokens, by which those that begin alike are found."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_metal.engine.request import Request

#: Tokens of a block. Small, because what a prompt shares with another beyond its last whole block is computed
#: again; copies of KV span many blocks, so that small ones cost nothing but bookkeeping.
BLOCK_SIZE = 64


def blocks(request: Request, num_tokens: int, *, start: int = 0) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The whole blocks among the first `num_tokens` known tokens, each with the position it begins at."""
    known = min(num_tokens, len(request.token_ids))
    for begin in range(start, known - BLOCK_SIZE + 1, BLOCK_SIZE):
        yield begin, tuple(request.token_ids[begin : begin + BLOCK_SIZE])


class BlockDigests:
    """For each whole block of a request's known tokens a digest of the text up to the block's end.

    Texts of different `kv_salt`s differ. Two texts may have one digest: compare them where that matters.
    """

    def __init__(self) -> None:
        self._digests: dict[Request, list[int]] = {}

    def of(self, request: Request) -> list[int]:
        """Computed once a block; remembered until `forget`."""
        digests = self._digests.setdefault(request, [])
        digest = digests[-1] if digests else hash(request.kv_salt)
        for _, tokens in blocks(request, len(request.token_ids), start=len(digests) * BLOCK_SIZE):
            digest = hash((digest, tokens))
            digests.append(digest)
        return digests

    def forget(self, request: Request) -> None:
        """Harmless for one that is not known."""
        self._digests.pop(request, None)
