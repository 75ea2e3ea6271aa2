"""Whether the GPU computes what the CPU does. A program of its own: a broken driver ends the process."""

from __future__ import annotations

import json
import sys

import mlx.core as mx

_SIZE = 256


def check() -> dict[str, object]:
    """`gpu` names the GPU, None where MLX has none; `difference` is relative to the largest value."""
    if not mx.is_available(mx.gpu):
        return {"gpu": None}
    with mx.stream(mx.cpu):
        left, right = mx.random.normal((2, _SIZE, _SIZE), key=mx.random.key(0))
        expected = left @ right
        mx.eval(left, right, expected)
    with mx.stream(mx.gpu):
        got = left @ right
        difference = mx.max(mx.abs(got - expected)) / mx.max(mx.abs(expected))
    return {"gpu": mx.device_info()["device_name"], "difference": difference.item()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(check()))
