"""All rows of a step sampled in one graph. A row's draw depends on its seed and position alone.

Order, as in vLLM and Hugging Face: temperature, then top-k, then top-p over what top-k left.
"""

from __future__ import annotations

import hashlib

import mlx.core as mx

from vllm_metal.engine.request import Request

#: How many of a row's largest logits are sorted to find its top-k and top-p cuts. Sorting whole rows costs
#: several times more, and is the fallback when a cut lies further down.
NUM_CANDIDATES = 256


def sample(logits: mx.array, requests: list[Request]) -> list[int | None]:
    """Token ids for `logits` [rows, vocabulary], one row a request; None where a row holds NaN."""
    logits = logits.astype(mx.float32)
    # A NaN anywhere makes the row's sum NaN; infinities (masked tokens) are made finite first.
    valid = ~mx.isnan(mx.sum(mx.clip(logits, -1e30, 1e30), axis=-1))
    greedy = mx.argmax(logits, axis=-1)
    if all(request.params.greedy for request in requests):
        mx.eval(greedy, valid)
        token_ids = greedy
    else:
        token_ids = _sample(logits, greedy, requests)
        mx.eval(valid)
    rows: list[tuple[int, bool]] = list(zip(token_ids.tolist(), valid.tolist(), strict=True))  # type: ignore[arg-type]
    return [token_id if ok else None for token_id, ok in rows]


def _sample(logits: mx.array, greedy: mx.array, requests: list[Request]) -> mx.array:
    params = [request.params for request in requests]
    vocab_size = logits.shape[-1]
    temperature = mx.array([1.0 if row.greedy else row.temperature for row in params])
    scaled = logits / temperature[:, None]
    # Greedy rows take no part in the cuts, or they could send the others to the slow path.
    top_k = mx.array([vocab_size if row.greedy or row.top_k <= 0 else row.top_k for row in params])
    top_p = mx.array([1.0 if row.greedy else row.top_p for row in params])
    uniform = mx.array([_uniform(request) for request in requests])

    cut = any(not row.greedy and (row.top_k > 0 or row.top_p < 1.0) for row in params)
    if not cut:
        token_ids = _draw(scaled, mx.full((len(params),), -mx.inf), uniform)
    else:
        num_candidates = min(NUM_CANDIDATES, vocab_size)
        threshold, found = _threshold(scaled, top_k, top_p, num_candidates)
        token_ids = _draw(scaled, threshold, uniform)
        mx.eval(token_ids, found)
        if not mx.all(found).item():
            threshold, _ = _threshold(scaled, top_k, top_p, vocab_size)
            token_ids = _draw(scaled, threshold, uniform)
    token_ids = mx.where(mx.array([row.greedy for row in params]), greedy, token_ids)
    mx.eval(token_ids)
    return token_ids


def _threshold(
    scaled: mx.array, top_k: mx.array, top_p: mx.array, num_candidates: int
) -> tuple[mx.array, mx.array]:
    """The smallest logit each row keeps [rows], and whether the cut lies among its candidates [rows].

    Top-p keeps the shortest run of the most likely tokens whose probability reaches `top_p`
    (Holtzman et al., 2020), out of what top-k kept.
    """
    vocab_size = scaled.shape[-1]
    if num_candidates < vocab_size:
        candidates = mx.topk(scaled, num_candidates, axis=-1)
    else:
        candidates = scaled
    candidates = mx.sort(candidates, axis=-1)[:, ::-1]
    rank = mx.arange(num_candidates)[None]
    in_top_k = rank < top_k[:, None]
    # Without a top-k the whole vocabulary shares the probability, not the candidates alone.
    kept = mx.where(in_top_k, candidates, -mx.inf)
    total = mx.where(top_k < num_candidates, mx.logsumexp(kept, axis=-1), mx.logsumexp(scaled, axis=-1))
    mass = mx.cumsum(mx.exp(kept - total[:, None]), axis=-1)
    # A token stays if the mass before it has not reached top_p; the first always does.
    stays = in_top_k & ((mass - mx.exp(kept - total[:, None]) < top_p[:, None]) | (rank == 0))
    unbounded = (top_k >= vocab_size) & (top_p >= 1.0)
    last = mx.sum(stays, axis=-1, keepdims=True) - 1
    threshold = mx.take_along_axis(candidates, last, axis=-1)[:, 0]
    threshold = mx.where(unbounded, -mx.inf, threshold)
    found = unbounded | (top_k <= num_candidates) | (mass[:, -1] >= top_p)
    if num_candidates == vocab_size:
        found = mx.ones_like(found)
    return threshold, found


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
    if request.params.greedy:
        return 0.0
    key = f"{request.seed}:{request.num_output_tokens}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=3).digest()) / (1 << 24)
