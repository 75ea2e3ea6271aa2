"""JSON sets no limit to the length of a number, so a weak model may write digits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Characters, more than any number of 64 bits takes.
_MOST = 32
_NUMBER = frozenset(b"0123456789+-.eE")
_DIGITS = frozenset(b"0123456789")
_QUOTE, _BACKSLASH = b'"\\'


@dataclass(slots=True)
class NumberLength:
    """Of the number within which a JSON text ends. `going_on` [words] are the tokens that make one longer."""

    token_bytes: Callable[[int], bytes]
    going_on: NDArray[np.int32]
    in_string: bool = False
    escaped: bool = False
    length: int = 0
    ends_in_digit: bool = False

    def feed(self, token_id: int) -> None:
        for byte in self.token_bytes(token_id):
            if self.escaped:
                self.escaped = False
            elif byte == _QUOTE:
                self.in_string = not self.in_string
            elif byte == _BACKSLASH:
                self.escaped = self.in_string
            self.length = self.length + 1 if byte in _NUMBER and not self.in_string else 0
            self.ends_in_digit = byte in _DIGITS

    def bound(self, mask: NDArray[np.int32]) -> None:
        """Take tokens that go on from `mask` [words] if the number is long enough and may end here."""
        if self.length >= _MOST and self.ends_in_digit:
            ending = mask & ~self.going_on
            if ending.any():
                mask[:] = ending
