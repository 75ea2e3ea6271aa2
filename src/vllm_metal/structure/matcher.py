"""Where answers stand in their grammars, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from vllm_metal.structure.number_length import NumberLength


class Matcher:
    """The place of one answer in its grammar."""

    __slots__ = ("_number_length", "inner", "num_words")

    def __init__(self, matcher: LLMatcher, num_words: int, number_length: NumberLength | None) -> None:
        self.inner = matcher
        self._number_length = number_length
        #: Words of 32 tokens in a mask.
        self.num_words = num_words

    def advance(self, token_id: int) -> None:
        """Go on by the answer's next token."""
        self.inner.consume_token(token_id)
        if self._number_length is not None:
            self._number_length.feed(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        stopped: bool = self.inner.is_stopped()
        return stopped

    @property
    def error(self) -> str | None:
        """Why this answer cannot go on."""
        if not self.inner.is_error():
            return None
        return f"its grammar became too complex: {self.inner.get_error().partition(chr(10))[0]}"

    def bound_number(self, mask: NDArray[np.int32]) -> None:
        """Take what would make a number too long from `mask` [words]."""
        if self._number_length is not None:
            self._number_length.bound(mask)


def masks(matchers: Sequence[Matcher]) -> NDArray[np.int32]:
    """A bit for each token that may come next, the first in the lowest: [matchers, words].

    One that cannot go on lets all pass. Other threads run meanwhile.
    """
    filled = np.full((len(matchers), matchers[0].num_words), -1, np.int32)
    able = [(row, each) for row, each in enumerate(matchers) if each.error is None]
    if able:
        fill_next_token_bitmask_par(_executor(), [(each.inner, row) for row, each in able], filled)
    for row, each in able:
        if each.error is None:
            each.bound_number(filled[row])
        else:
            filled[row] = -1
    return filled


@cache
def _executor() -> LLExecutor:
    return LLExecutor()
