"""Counts the tokens of one answer's reasoning."""

from __future__ import annotations

from collections.abc import Iterable


class ThoughtCounter:
    """`begin` and `end` are the tokens that mark reasoning, and count too. The prompt may have `begun` it."""

    def __init__(self, begin: int, end: int, *, begun: bool) -> None:
        self.num_tokens = 0
        self._begin = begin
        self._end = end
        self._begun = begun

    def count(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._begun = self._begun or token_id == self._begin
            self.num_tokens += self._begun
            self._begun = self._begun and token_id != self._end
