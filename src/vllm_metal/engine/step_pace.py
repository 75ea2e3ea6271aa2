"""Bounds how much prefill may slow decoding down, from measured step times."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

#: Steps over which the bound holds on average.
WINDOW = 16
#: Observations kept of each shape of step.
_NUM_KEPT = 9


class StepPace:
    """Deals prefill tokens so that the mean step lasts at most `max_stretch` times a decode-only one.

    The cost of a step is modelled as that of its decode rows plus that of its prefill tokens, both medians of
    what was observed of steps of about that size. Each step with decodes earns `max_stretch` - 1 decode-only
    steps' time of credit, and prefill spends it. Chunks below `min_chunk` tokens are inefficient, so
    credit is saved up for one instead. There is no feedback to tune: with one step ahead, a step's time
    is known only two steps later.
    """

    def __init__(self, max_stretch: float, min_chunk: int) -> None:
        self.max_stretch = max_stretch
        self.min_chunk = min_chunk
        self._credit_s = 0.0
        self._decode_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._prefill_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._seen: set[tuple[int, int]] = set()

    def allowance(self, num_decodes: int, limit: int) -> int:
        """Prefill tokens, at most `limit`, that the next step may hold beside `num_decodes` decode rows."""
        if num_decodes == 0:
            return limit
        earned_s = (self.max_stretch - 1) * self._decode_cost(num_decodes)
        most_s = WINDOW * earned_s
        self._credit_s = min(self._credit_s + earned_s, most_s)
        num_tokens = int(self._credit_s / self._token_cost(limit, num_decodes))
        if num_tokens < self.min_chunk and self._credit_s < most_s:
            return 0
        return min(max(num_tokens, self.min_chunk), limit)

    def spend(self, num_decodes: int, num_prefill_tokens: int) -> None:
        """Pay for what the step did hold."""
        if num_decodes and num_prefill_tokens:
            cost_s = num_prefill_tokens * self._token_cost(num_prefill_tokens, num_decodes)
            self._credit_s = max(0.0, self._credit_s - cost_s)

    def observe(self, num_decodes: int, num_prefill_tokens: int, duration_s: float) -> None:
        """Learn from a finished step. The first of a shape is left out: it may have compiled something."""
        shape = (num_decodes.bit_length(), num_prefill_tokens.bit_length())
        if shape not in self._seen:
            self._seen.add(shape)
        elif num_prefill_tokens == 0:
            self._decode_s[shape[0]].append(duration_s)
        elif num_prefill_tokens >= self.min_chunk:
            decode_s = self._decode_cost(num_decodes) if num_decodes else 0.0
            self._prefill_s[shape[1]].append(max(duration_s - decode_s, 0.0) / num_prefill_tokens)

    def _decode_cost(self, num_decodes: int) -> float:
        return _nearest(self._decode_s, num_decodes.bit_length()) or 0.01

    def _token_cost(self, num_tokens: int, num_decodes: int) -> float:
        """Seconds a prefill token; until one was seen, a least chunk is taken to cost a decode step."""
        known = _nearest(self._prefill_s, num_tokens.bit_length())
        return max(known or self._decode_cost(num_decodes) / self.min_chunk, 1e-9)


def _nearest(observed: dict[int, deque[float]], size: int) -> float | None:
    """The median of the size class nearest to `size` that has been seen."""
    sizes = [known for known, values in observed.items() if values]
    return median(observed[min(sizes, key=lambda known: abs(known - size))]) if sizes else None
