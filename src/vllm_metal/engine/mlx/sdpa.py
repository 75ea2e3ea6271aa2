"""The one name of mlx-lm that is replaced: its models' `scaled_dot_product_attention`.

The replacement looks at the cache it is given. One that has a method `attend` attends for itself; any other
goes to mlx-lm's own function, so that models of both kinds may share a module.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

_original = base.scaled_dot_product_attention


def install() -> None:
    """Replace the name in every model module imported so far. Doing it twice is harmless."""
    for name, module in list(sys.modules.items()):
        is_model = name.startswith("mlx_lm.models.")
        if is_model and getattr(module, "scaled_dot_product_attention", None) is _original:
            module.scaled_dot_product_attention = _routed  # type: ignore[attr-defined]


def _routed(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    attend = getattr(cache, "attend", None)
    output: mx.array
    if attend is None:
        output = _original(queries, keys, values, cache, scale, mask, sinks)
    else:
        output = attend(queries, scale=scale, mask=mask, sinks=sinks)
    return output
