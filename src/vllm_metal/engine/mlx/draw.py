"""Draws a token for each row that is not greedy: temperature, min-p, top-k, then top-p over what is left.

The order is that of vLLM and Hugging Face. A row's draw depends on its seed and position alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import mlx.core as mx

from vllm_metal.engine.request import Request

#: How many of a row's largest logits are looked at where sorting all is what costs (on the CPU). Picking them
#: costs the same whatever their number.
NUM_CANDIDATES = 2048


class Draw:
    """With `candidates` the cuts of top-k and top-p are looked for among a row's largest logits first, and
    the device is waited for to learn whether that was enough. Without, whole rows are sorted, with no wait.
    """

    def __init__(self, *, candidates: bool) -> None:
        self.candidates = candidates
        self.active = False

    def arrange(self, rows: Sequence[Request | None], vocab_size: int) -> None:
        """Make ready for steps of these rows."""
        # Greedy rows and padding take no part in the cuts, or they could send the others to the slow path.
        self._drawn = [request if request and not request.params.greedy else None for request in rows]
        self.active = any(self._drawn)
        if not self.active:
            return
        asked = [request.params if request else None for request in self._drawn]
        top_k = [params.top_k if params and params.top_k > 0 else vocab_size for params in asked]
        top_p = [params.top_p if params else 1.0 for params in asked]
        min_p = [params.min_p if params else 0.0 for params in asked]
        packed = mx.array(
            [
                [params.temperature if params else 1.0 for params in asked],
                top_k,
                top_p,
                [math.log(p) if p > 0 else -math.inf for p in min_p],
                [params is None for params in asked],
            ],
            mx.float32,
        )
        self._temperature, self._top_k, self._top_p, self._log_min_p, greedy = packed
        self._greedy = greedy > 0
        self._has_min_p = any(min_p)
        is_cut = [k < vocab_size or p < 1.0 for k, p in zip(top_k, top_p, strict=True)]
        self._has_cut = any(is_cut)
        self._all_cut = all(is_cut[row] for row, params in enumerate(asked) if params)

    def draw(self, logits: mx.array, greedy: mx.array) -> mx.array:
        """Token ids [rows] out of `logits` [rows, vocabulary]; greedy rows get theirs of `greedy` [rows]."""
        uniform = mx.array([uniform_for(request) if request else 0.0 for request in self._drawn])
        scaled = logits / self._temperature[:, None]
        if self._has_min_p:
            least = mx.max(scaled, axis=-1) + self._log_min_p
            scaled = mx.where(scaled >= least[:, None], scaled, -mx.inf)
        if self._has_cut:
            token_ids = self._cut_and_draw(scaled, uniform)
        else:
            token_ids = _draw(scaled, mx.full((len(self._drawn),), -mx.inf), uniform)
        return mx.where(self._greedy, greedy, token_ids)

    def _cut_and_draw(self, scaled: mx.array, uniform: mx.array) -> mx.array:
        vocab_size = scaled.shape[-1]
        if self.candidates and vocab_size > NUM_CANDIDATES:
            rest = vocab_size - NUM_CANDIDATES
            # In the vocabulary's order, so that a draw among them is the draw among all.
            ids = mx.sort(mx.argpartition(scaled, rest, axis=-1)[:, rest:], axis=-1)
            candidates = mx.take_along_axis(scaled, ids, axis=-1)
            threshold, found = _threshold(scaled, candidates, self._top_k, self._top_p)
            if self._all_cut:
                drawn = _draw(candidates, threshold, uniform)
                token_ids = mx.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
            else:
                token_ids = _draw(scaled, threshold, uniform)
            mx.eval(token_ids, found)
            if mx.all(found).item():
                return token_ids
        threshold, _ = _threshold(scaled, scaled, self._top_k, self._top_p)
        return _draw(scaled, threshold, uniform)


def _threshold(
    scaled: mx.array, candidates: mx.array, top_k: mx.array, top_p: mx.array
) -> tuple[mx.array, mx.array]:
    """The smallest logit each row keeps [rows], and whether the cut lies among its candidates [rows].

    Top-p keeps the shortest run of the most likely tokens whose probability reaches `top_p`
    (Holtzman et al., 2020), out of what top-k kept.
    """
    vocab_size = scaled.shape[-1]
    candidates = mx.sort(candidates, axis=-1)[:, ::-1]
    rank = mx.arange(candidates.shape[-1])[None]
    in_top_k = rank < top_k[:, None]
    kept = mx.where(in_top_k, candidates, -mx.inf)
    # Without a top-k the whole vocabulary shares the probability, not the candidates alone.
    has_top_k = top_k < vocab_size
    total = mx.where(has_top_k, mx.logsumexp(kept, axis=-1), mx.logsumexp(scaled, axis=-1))
    probabilities = mx.exp(kept - total[:, None])
    mass = mx.cumsum(probabilities, axis=-1)
    # A token stays if the mass before it has not reached top_p; the first always does.
    stays = in_top_k & ((mass - probabilities < top_p[:, None]) | (rank == 0))
    last = mx.sum(stays, axis=-1, keepdims=True) - 1
    threshold = mx.take_along_axis(candidates, last, axis=-1)[:, 0]
    unbounded = ~has_top_k & (top_p >= 1.0)
    # A token that is as likely as the last candidate may not be among them, nor may all of a larger top-k.
    shared_by_known = ~has_top_k | (top_k <= candidates.shape[-1])
    found = unbounded | (shared_by_known & (threshold > candidates[:, -1]))
    return mx.where(unbounded, -mx.inf, threshold), found


def _draw(scaled: mx.array, threshold: mx.array, uniform: mx.array) -> mx.array:
    """Inverse CDF over the tokens at or above `threshold`: the first whose summed share passes `uniform`."""
    kept = mx.where(scaled >= threshold[:, None], scaled, -mx.inf)
    weights = mx.exp(kept - mx.max(kept, axis=-1, keepdims=True))
    cumulated = mx.cumsum(weights, axis=-1)
    target = uniform[:, None] * cumulated[:, -1:]
    # Rounding can leave no share above the target; the last token with weight is then meant.
    above = (cumulated > target) & (weights > 0)
    last = weights.shape[-1] - 1 - mx.argmax((weights > 0)[:, ::-1], axis=-1)
    return mx.where(mx.any(above, axis=-1), mx.argmax(above, axis=-1), last)


def uniform_for(request: Request) -> float:
    """A number in [0, 1), from the request's seed and position only.

    The top 24 bits of BLAKE2b: all that a float32 in [0, 1) can hold.
    """
    key = f"{request.seed}:{request.num_sampled_tokens}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=3).digest()) / (1 << 24)
