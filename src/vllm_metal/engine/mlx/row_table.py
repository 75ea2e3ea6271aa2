"""A row of numbers over the vocabulary for each request, kept on the device while the batch changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from vllm_metal.engine.request import Request


class RowTable:
    """`make_row` gives a newcomer's row [vocabulary]; rows of those that stay move along with them."""

    def __init__(self, make_row: Callable[[Request, int], NDArray[Any]], dtype: mx.Dtype) -> None:
        self._make_row = make_row
        self._dtype = dtype
        self._requests: list[Request | None] = []
        self.array = mx.zeros((0, 0), dtype)

    def arrange(self, requests: Sequence[Request | None], vocab_size: int) -> None:
        """Have `array` [requests, vocabulary] hold the rows of `requests`, and zeros for None."""
        if not self._requests:
            self.array = mx.zeros((0, vocab_size), self._dtype)
        row_of = {request: row for row, request in enumerate(self._requests) if request is not None}
        newcomers = [request for request in requests if request is not None and request not in row_of]
        row_of |= {request: row for row, request in enumerate(newcomers, len(self._requests))}
        made = [mx.array(self._make_row(request, vocab_size))[None] for request in newcomers]
        table = mx.concatenate([self.array, *made, mx.zeros((1, vocab_size), self._dtype)])
        zeros = len(table) - 1
        index = [zeros if request is None else row_of[request] for request in requests]
        self._requests = list(requests)
        self.array = table[mx.array(index)]

    def clear(self) -> None:
        self._requests = []
        self.array = mx.zeros((0, 0), self._dtype)
