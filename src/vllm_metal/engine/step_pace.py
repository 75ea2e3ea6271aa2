"""Bounds how much prefill may slow decoding down, from measured step times."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

#: Steps over which the bound holds on average.
WINDOW = 16
#: Observations kept of each size of step, and after how many of others a size is forgotten.
_NUM_KEPT = 9
_NUM_REMEMBERED = 128
#: What a decode step is taken to last until one was seen.
_GUESS_S = 0.01
#: How many times as much as for being a chunk a worthwhile one costs for its tokens.
_WORTH = 2


class StepPace:
    """Deals prefill tokens so that the mean step lasts at most `max_stretch` times a decode-only one.

    A step's time is modelled as that of its decode rows, plus a fixed cost of prefilling at all, plus a cost
    a token. Each step with decodes earns `max_stretch` - 1 decode-only steps' time of credit, and prefill
    spends it: what it is believed to cost when it is dealt, and the difference once its time is known, which
    with one step ahead is two steps later. So the bound holds even where a step compiles something or sizes
    cost what nothing foretold; belief only decides how credit is best spent. A chunk smaller than `min_chunk`
    tokens, or one that costs more for being a chunk than is worth it, is waste: credit is saved up for a
    larger one instead.
    """

    def __init__(self, max_stretch: float, min_chunk: int) -> None:
        self.max_stretch = max_stretch
        self.min_chunk = min_chunk
        self._credit_s = 0.0
        self._decode_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._prefill: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._num_observed = 0
        self._observed_at: dict[int, int] = {}
        self._seen: set[tuple[int, int]] = set()
        self._fixed_s, self._token_s = 0.0, _GUESS_S / min_chunk

    def allowance(self, num_decodes: int, num_wanted: int) -> int:
        """How many of `num_wanted` prefill tokens the next step may hold beside `num_decodes` decode rows."""
        if num_decodes == 0:
            return num_wanted
        earned_s = self._earned(num_decodes)
        most_s = WINDOW * earned_s
        self._credit_s = min(self._credit_s + earned_s, most_s)
        worthwhile = max(self.min_chunk, int(_WORTH * self._fixed_s / self._token_s))
        # A few short prompts are worth a step of their own only if it is cheap: soon they may be more.
        thrift = 2 if num_wanted < worthwhile else 1
        affordable = int((self._credit_s / thrift - self._fixed_s) / self._token_s)
        if affordable >= num_wanted:
            return num_wanted
        least = min(worthwhile, num_wanted)
        if affordable < least and self._credit_s < most_s:
            return 0
        # A power of two: part of a prompt then comes in few shapes.
        return min(1 << max(affordable, least).bit_length() - 1, num_wanted)

    def spend(self, num_decodes: int, num_prefill_tokens: int) -> None:
        """Pay for what the step is believed to cost."""
        if num_decodes and num_prefill_tokens:
            self._credit_s -= self._cost(num_prefill_tokens)

    def observe(self, num_decodes: int, num_prefill_tokens: int, duration_s: float) -> None:
        """Learn from a finished step, and settle what it cost beyond belief.

        The first of a shape teaches nothing: it may have compiled something.
        """
        extra_s = max(0.0, duration_s - (self._decode_cost(num_decodes) if num_decodes else 0.0))
        if num_decodes and num_prefill_tokens:
            # No step costs more than a window: what is compiled once must not end prefill for long.
            unforeseen_s = min(extra_s - self._cost(num_prefill_tokens), WINDOW * self._earned(num_decodes))
            self._credit_s -= unforeseen_s
        shape = (num_decodes.bit_length(), num_prefill_tokens.bit_length())
        if shape not in self._seen:
            self._seen.add(shape)
        elif num_prefill_tokens == 0:
            self._decode_s[shape[0]].append(duration_s)
        else:
            self._learn(shape[1], num_prefill_tokens, extra_s)

    def _learn(self, size: int, num_tokens: int, extra_s: float) -> None:
        self._num_observed += 1
        self._observed_at[size] = self._num_observed
        self._prefill[size].append((num_tokens, extra_s))
        # A size that is believed to be dear is not dealt, so nothing else would ever correct that.
        for old in [
            each for each in self._prefill if self._num_observed - self._observed_at[each] > _NUM_REMEMBERED
        ]:
            del self._prefill[old]
        self._fit()

    def _fit(self) -> None:
        """A line through the smallest and the largest size seen."""
        sizes = [
            (median(tokens for tokens, _ in values), _usual([extra_s for _, extra_s in values]))
            for _, values in sorted(self._prefill.items())
        ]
        (few, few_s), (many, many_s) = sizes[0], sizes[-1]
        # Of one size alone half is taken to be for being a chunk, which has larger ones tried.
        slope_s = (many_s - few_s) / (many - few) if many > few else many_s / many / 2
        # Noise can tilt the line until one of the two costs is negative; the other then is all there is.
        self._token_s = max(min(slope_s, many_s / many), 1e-9)
        self._fixed_s = max(few_s - few * self._token_s, 0.0)

    def _cost(self, num_prefill_tokens: int) -> float:
        return self._fixed_s + num_prefill_tokens * self._token_s

    def _earned(self, num_decodes: int) -> float:
        return (self.max_stretch - 1) * self._decode_cost(num_decodes)

    def _decode_cost(self, num_decodes: int) -> float:
        """The median of the size nearest to `num_decodes` that has been seen."""
        size = num_decodes.bit_length()
        seen = [known for known, values in self._decode_s.items() if values]
        if not seen:
            return _GUESS_S
        return median(self._decode_s[min(seen, key=lambda known: abs(known - size))])


def _usual(durations_s: list[float]) -> float:
    """The lower quartile: what comes on top is for memory that grows or shapes that are new."""
    return sorted(durations_s)[len(durations_s) // 4]
