"""Which LoRA adapter each batch row uses, for the layers of `adapted_layers.py` to look up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from vllm_metal.engine.request import Request

#: The adapters of a layer, as they are counted, and the rank that each has there.
Ranks = tuple[tuple[int, int], ...]


class Adapters:
    """Those of one model, counted from 1, and the rows of the forward that is under way."""

    def __init__(self) -> None:
        self.num_adapters = 0
        self.num_bytes = 0
        self._rows: mx.array | None = None
        self._masks: dict[Ranks, mx.array] = {}
        self._order: mx.array | None = None

    @contextmanager
    def used_by(self, rows: mx.array | None) -> Iterator[None]:
        """Forwards meanwhile are of batch rows with the adapters `rows` [rows]; None if no row has one."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None
            self._masks.clear()

    @contextmanager
    def used_by_requests(self, requests: Sequence[Request]) -> Iterator[None]:
        """Forwards meanwhile are of a batch row for each of `requests`."""
        rows = [request.adapter for request in requests]
        with self.used_by(mx.array(rows) if any(rows) else None):
            yield

    @property
    def are_used(self) -> bool:
        return self._rows is not None

    @contextmanager
    def sorted_by(self, order: mx.array | None) -> Iterator[None]:
        """What layers call sorted meanwhile are tokens in this order, each as often as it has experts."""
        self._order = order
        try:
            yield
        finally:
            self._order = None

    def only_own(self, columns: mx.array, ranks: Ranks, *, are_sorted: bool = False) -> mx.array:
        """`columns` [tokens in any shape, ranks of all adapters], with zeros for all but each row's own."""
        mask = self._mask(ranks)
        if are_sorted:
            assert self._order is not None
            return mx.where(mask[self._order // (len(self._order) // len(mask))], columns, 0)
        # However a model folds them, the tokens of a batch row stay together.
        of_rows = columns.reshape(len(mask), -1, columns.shape[-1])
        return mx.where(mask, of_rows, 0).reshape(columns.shape)

    def _mask(self, ranks: Ranks) -> mx.array:
        """[rows, 1, ranks of all adapters]."""
        assert self._rows is not None
        if ranks not in self._masks:
            owners = mx.array([adapter for adapter, rank in ranks for _ in range(rank)])
            self._masks[ranks] = self._rows[:, None, None] == owners
        return self._masks[ranks]


def of(model: Any) -> Adapters:
    """The same each time for one model; empty unless adapters were installed."""
    if not hasattr(model, "lora_adapters"):
        model.lora_adapters = Adapters()
    adapters: Adapters = model.lora_adapters
    return adapters
