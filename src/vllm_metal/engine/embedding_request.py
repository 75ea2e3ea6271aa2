"""What an embedding model is asked and what it gives: whole inputs, and a vector for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """One text, or a pair of them for a model that compares, whose second begins at `second_start`.

    `dimensions` is how much of the vector is wanted, all of it if None.
    """

    #: Best an array of the standard library, as they may be many.
    token_ids: Sequence[int]
    second_start: int | None = None
    dimensions: int | None = None


def num_tokens(inputs: Iterable[EmbeddingInput]) -> int:
    return sum(len(each.token_ids) for each in inputs)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    request_id: str
    inputs: Sequence[EmbeddingInput]

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.inputs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The `vectors` of a request's inputs, in order, as float32 bytes; or an `error` in the user's words.

    A model that compares gives vectors of one number.
    """

    request_id: str
    vectors: Sequence[bytes] = ()
    error: str | None = None
