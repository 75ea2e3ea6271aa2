"""How much an embedding model may compute at a time, so that others get the device soon."""

from __future__ import annotations

from collections import deque
from statistics import median

#: What part of another engine's step a piece may last.
_SHARE = 0.3
#: How long a piece may last where no other engine is at work: so long waits one that begins.
_ALONE_S = 0.2
#: Fewer tokens take as long.
_LEAST_TOKENS = 16
#: Tokens a second, until a piece was seen.
_GUESS = 1000.0
_NUM_KEPT = 9


class EmbeddingPace:
    """Deals in tokens through the whole model. What a second computes is the median of the last pieces."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_NUM_KEPT)

    def allowance(self, others_step_s: float | None) -> int:
        """Tokens of the next piece, beside engines whose steps take so long; None stands for no others."""
        rate = median(self._rates) if self._rates else _GUESS
        piece_s = _ALONE_S if others_step_s is None else min(_SHARE * others_step_s, _ALONE_S)
        return max(int(rate * piece_s), _LEAST_TOKENS)

    def observe(self, num_tokens: float, duration_s: float) -> None:
        self._rates.append(num_tokens / max(duration_s, 1e-6))
