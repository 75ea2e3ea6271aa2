"""LoRA adapters of a loaded model, any of which a batch row may use, beside one copy of the weights.

The matrices of all adapters of a layer lie side by side, so that it takes two more products, however many
adapters and rows there are; what lies between the two is zeroed where it is not of the row's own adapter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from vllm_metal.engine.mlx import adapter_files
from vllm_metal.engine.mlx.adapter_files import LowRank
from vllm_metal.engine.mlx.override import override
from vllm_metal.engine.request import Request

#: The adapters of a layer, by their numbers, and the rank that each has there.
_Ranks = tuple[tuple[int, int], ...]


class Adapters:
    """Those of one model, and which of them each batch row uses in the forward that is under way.

    They are counted from 1; 0 means none.
    """

    def __init__(self) -> None:
        self.num_adapters = 0
        self.num_bytes = 0
        self._rows: mx.array | None = None
        self._masks: dict[_Ranks, mx.array] = {}

    @contextmanager
    def used_by(self, rows: mx.array | None) -> Iterator[None]:
        """Forwards meanwhile are of batch rows with the adapters `rows` [rows], or all without one."""
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

    def mask(self, ranks: _Ranks) -> mx.array:
        """Which columns are of the row's own adapter: [rows, 1, columns]."""
        assert self._rows is not None
        if ranks not in self._masks:
            owners = mx.array([adapter for adapter, rank in ranks for _ in range(rank)])
            self._masks[ranks] = self._rows[:, None, None] == owners
        return self._masks[ranks]


def of(model: Any) -> Adapters:
    """The same each time for one model, and with nothing in it unless `install` was called."""
    if not hasattr(model, "lora_adapters"):
        model.lora_adapters = Adapters()
    adapters: Adapters = model.lora_adapters
    return adapters


def install(model: Any, folders: Sequence[Path], dtype: mx.Dtype) -> None:
    """Load the adapters of `folders`, counted in this order; they compute in `dtype`.

    Raises NotAModel where files are missing or damaged, UnsupportedModel for an adapter that does not fit.
    """
    adapters = of(model)
    by_layer: dict[str, dict[int, LowRank]] = defaultdict(dict)
    for adapter, folder in enumerate(folders, 1):
        for path, matrices in adapter_files.read(folder, model).items():
            by_layer[path][adapter] = matrices
    adapters.num_adapters = len(folders)
    modules = dict(model.named_modules())
    for path, of_layer in by_layer.items():
        a = mx.concatenate([matrices.a.astype(dtype) for matrices in of_layer.values()], axis=1)
        b = mx.concatenate([matrices.b.astype(dtype) for matrices in of_layer.values()], axis=0)
        mx.eval(a, b)
        ranks = tuple((adapter, matrices.rank) for adapter, matrices in of_layer.items())
        _adapt(modules[path], adapters, LowRank(a, b), ranks)
        adapters.num_bytes += a.nbytes + b.nbytes


def _adapt(layer: Any, adapters: Adapters, matrices: LowRank, ranks: _Ranks) -> None:
    own = type(layer)

    def adapted(self: Any, inputs: mx.array) -> mx.array:
        outputs: mx.array = own.__call__(self, inputs)
        if not adapters.are_used:
            return outputs
        mask = adapters.mask(ranks)
        columns = inputs @ matrices.a
        # However a model folds them, the tokens of a batch row stay together.
        of_rows = columns.reshape(len(mask), -1, matrices.rank)
        columns = mx.where(mask, of_rows, 0).reshape(columns.shape)
        return outputs + (columns @ matrices.b).astype(outputs.dtype)

    override(layer, "__call__", adapted)
