"""At load: does this model give the same logits in a batch as alone? Decided by trying, never by its name."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from vllm_metal.engine.mlx import kv_cache

logger = logging.getLogger(__name__)

#: Largest difference allowed, as a share of the logits' spread.
_TOLERANCE = {mx.float32: 1e-3}
_TOLERANCE_HALF = 5e-2


def batches_agree(model: Any, vocab_size: int) -> bool:
    """Decode two prompts of unequal length alone and as one batch that the second joins late."""
    prompts = [[(7 * i + 3) % vocab_size for i in range(5)], [(11 * i + 1) % vocab_size for i in range(2)]]
    steps = [5 % vocab_size, 17 % vocab_size, 29 % vocab_size]
    try:
        if not kv_cache.can_merge(kv_cache.new_caches(model)):
            return False
        alone = [_decode(model, _prefill(model, prompt), steps) for prompt in prompts]
        caches = _prefill(model, prompts[0])
        batch = kv_cache.merge([caches])
        first = model(mx.array([[steps[0]]]), cache=batch)
        for layer, late in zip(batch, kv_cache.merge([_prefill(model, prompts[1])]), strict=True):
            layer.extend(late)
        together = [first]
        for step in range(1, len(steps)):
            together.append(model(mx.array([[steps[step]], [steps[step - 1]]]), cache=batch))
        mx.eval(alone, together)
    except Exception as exc:
        logger.debug("the batching check raised", exc_info=exc)
        return False
    tolerance = _TOLERANCE.get(first.dtype, _TOLERANCE_HALF)
    pairs = [(alone[0][0], together[0][0])]
    for step in range(1, len(steps)):
        pairs.append((alone[0][step], together[step][0]))
        pairs.append((alone[1][step - 1], together[step][1]))
    return all(_close(left, right, tolerance) for left, right in pairs)


def _prefill(model: Any, token_ids: list[int]) -> kv_cache.LayerCaches:
    caches = kv_cache.new_caches(model)
    model(mx.array([token_ids]), cache=caches)
    return caches


def _decode(model: Any, caches: kv_cache.LayerCaches, steps: list[int]) -> list[mx.array]:
    """Logits [1, vocabulary] after each of `steps`."""
    return [model(mx.array([[token_id]]), cache=caches)[0] for token_id in steps]


def _close(left: mx.array, right: mx.array, tolerance: float) -> bool:
    left, right = left.astype(mx.float32), right.astype(mx.float32)
    spread = mx.max(left) - mx.min(left)
    return bool((mx.max(mx.abs(left - right)) <= tolerance * spread).item())
