"""All rows of a step sampled in one graph. A row's draw depends on its seed and position alone.

Order, as in vLLM and Hugging Face: temperature, then top-k, then top-p over what top-k left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx

from vllm_metal.engine.core import ModelRunnerOutput
from vllm_metal.engine.request import Request

#: How many of a row's largest logits are sorted to find its cuts where sorting is what costs (on the CPU).
NUM_CANDIDATES = 256


class SampledStep:
    """Tokens that the device is sampling: `token_ids` and `valid` [rows]. Rows of no request are padding."""

    def __init__(self, rows: Sequence[Request | None], token_ids: mx.array, valid: mx.array) -> None:
        self.row_of = {request: row for row, request in enumerate(rows) if request is not None}
        self.token_ids = token_ids
        self.valid = valid

    @classmethod
    def nothing(cls) -> SampledStep:
        """A step that samples for no request."""
        return cls([None], mx.zeros(1, mx.uint32), mx.ones(1, mx.bool_))

    def read(self) -> ModelRunnerOutput:
        """Wait for the tokens. A row of NaN is an error of its request."""
        output = ModelRunnerOutput()
        token_ids: list[int] = self.token_ids.tolist()  # type: ignore[assignment]
        valid: list[bool] = self.valid.tolist()  # type: ignore[assignment]
        for request, row in self.row_of.items():
            if valid[row]:
                output.token_ids[request] = token_ids[row]
            else:
                output.errors[request] = "the model's output for this request is not a number (NaN)"
        return output


class Sampler:
    """With `candidates` the cuts of top-k and top-p are looked for among a row's largest logits first, and
    the device is waited for to learn whether that was enough. Without, whole rows are sorted, with no wait.
    """

    def __init__(self, *, candidates: bool) -> None:
        self.candidates = candidates

    def sample(self, logits: mx.array, rows: Sequence[Request | None]) -> SampledStep:
        """Sample `logits` [rows, vocabulary] for the requests of the rows; None is a row of padding."""
        logits = logits.astype(mx.float32)
        # A NaN anywhere makes the row's sum NaN; infinities (masked tokens) are made finite first.
        valid = ~mx.isnan(mx.sum(mx.clip(logits, -1e30, 1e30), axis=-1))
        token_ids = mx.argmax(logits, axis=-1)
        if any(request is not None and not request.params.greedy for request in rows):
            token_ids = self._sample(logits, token_ids, rows)
        return SampledStep(rows, token_ids, valid)

    def _sample(self, logits: mx.array, greedy: mx.array, rows: Sequence[Request | None]) -> mx.array:
        vocab_size = logits.shape[-1]
        # Greedy rows and padding take no part in the cuts, or they could send the others to the slow path.
        drawn = [request if request is not None and not request.params.greedy else None for request in rows]
        temperature = mx.array([request.params.temperature if request else 1.0 for request in drawn])
        top_k = [request.params.top_k if request else 0 for request in drawn]
        top_p = [request.params.top_p if request else 1.0 for request in drawn]
        uniform = mx.array([_uniform(request) if request else 0.0 for request in drawn])
        scaled = logits / temperature[:, None]
        if any(0 < k < vocab_size for k in top_k) or any(p < 1.0 for p in top_p):
            bounded = [k if k > 0 else vocab_size for k in top_k]
            token_ids = self._cut_and_draw(scaled, mx.array(bounded), mx.array(top_p), uniform)
        else:
            token_ids = _draw(scaled, mx.full((len(rows),), -mx.inf), uniform)
        return mx.where(mx.array([request is None for request in drawn]), greedy, token_ids)

    def _cut_and_draw(
        self, scaled: mx.array, top_k: mx.array, top_p: mx.array, uniform: mx.array
    ) -> mx.array:
        vocab_size = scaled.shape[-1]
        if self.candidates and vocab_size > NUM_CANDIDATES:
            threshold, found = _threshold(scaled, top_k, top_p, NUM_CANDIDATES)
            token_ids = _draw(scaled, threshold, uniform)
            mx.eval(token_ids, found)
            if mx.all(found).item():
                return token_ids
        threshold, _ = _threshold(scaled, top_k, top_p, vocab_size)
        return _draw(scaled, threshold, uniform)


def _threshold(
    scaled: mx.array, top_k: mx.array, top_p: mx.array, num_candidates: int
) -> tuple[mx.array, mx.array]:
    """The smallest logit each row keeps [rows], and whether the cut lies among its candidates [rows].

    Top-p keeps the shortest run of the most likely tokens whose probability reaches `top_p`
    (Holtzman et al., 2020), out of what top-k kept.
    """
    vocab_size = scaled.shape[-1]
    candidates = mx.topk(scaled, num_candidates, axis=-1) if num_candidates < vocab_size else scaled
    candidates = mx.sort(candidates, axis=-1)[:, ::-1]
    rank = mx.arange(num_candidates)[None]
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
    found = unbounded | (top_k <= num_candidates) | (~has_top_k & (mass[:, -1] >= top_p))
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


def _uniform(request: Request) -> float:
    """A number in [0, 1), from the request's seed and position only.

    The top 24 bits of BLAKE2b: all that a float32 in [0, 1) can hold.
    """
    key = f"{request.seed}:{request.num_sampled_tokens}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=3).digest()) / (1 << 24)
