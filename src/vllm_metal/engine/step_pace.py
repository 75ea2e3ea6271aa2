"""Bounds how much prefill may slow decoding down, from measured step times."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

#: Steps over which the bound holds on average.
WINDOW = 16
#: Observations kept of each size of step, and after how many of others a size is forgotten.
_NUM_KEPT = 9
_NUM_REMEMBERED = 128
#: What a decode step is taken to last until one was seen.
_GUESS_S = 0.01
#: Steps between the one that is dealt and the one that was observed last.
_MOST_IN_FLIGHT = 2
#: How many times as much as for being a chunk a worthwhile one costs for its tokens.
_WORTH = 2


@dataclass(frozen=True, slots=True)
class _Step:
    """`is_beside` prefill if the step before held some."""

    num_decodes: int
    num_prefill_tokens: int
    duration_s: float
    is_beside: bool

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes > 0 and self.num_prefill_tokens == 0


class StepPace:
    """Deals prefill tokens so that the mean step lasts at most `max_stretch` times a decode-only one.

    A step's time is modelled as that of its decode rows, plus a fixed cost of prefilling at all, plus a cost
    a token. Each step with decodes earns `max_stretch` - 1 decode-only steps' time of credit, and prefill
    spends it: what it is believed to cost when it is dealt, and the difference once its time is known, which
    with one step ahead is two steps later. So the bound holds even where a step compiles something or sizes
    cost what nothing foretold; belief only decides how credit is best spent. Where the host is what takes
    the time, launching a chunk makes the steps beside it last longer: that is paid for, too. A chunk smaller
    than `min_chunk` tokens, or one that costs more for being a chunk than is worth it, is waste: credit is
    saved up for a larger one instead.
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
        # For steps that are not observed yet. Beliefs change meanwhile.
        self._paid_s: deque[float] = deque(maxlen=_MOST_IN_FLIGHT)
        self._last = _Step(0, 0, 0.0, is_beside=False)
        self._fixed_s, self._token_s = 0.0, _GUESS_S / min_chunk
        # Twice the most that was seen: beyond, costs may rise in ways that nothing foretells.
        self._most_tried = 1 << 30

    def allowance(self, num_decodes: int, num_wanted: int) -> int:
        """How many of `num_wanted` prefill tokens the next step may hold beside `num_decodes` decode rows."""
        if num_decodes == 0:
            return num_wanted
        earned_s = self._earned(num_decodes)
        most_s = WINDOW * earned_s
        self._credit_s = min(self._credit_s + earned_s, most_s)
        worthwhile = min(max(self.min_chunk, int(_WORTH * self._fixed_s / self._token_s)), self._most_tried)
        # A few short prompts are worth a step of their own only if it is cheap: soon they may be more.
        thrift = 2 if num_wanted < worthwhile else 1
        affordable = min(int((self._credit_s / thrift - self._fixed_s) / self._token_s), self._most_tried)
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
            self._paid_s.append(self._fixed_s + num_prefill_tokens * self._token_s)
            self._credit_s -= self._paid_s[-1]

    def observe(self, num_decodes: int, num_prefill_tokens: int, duration_s: float) -> None:
        """Learn from a finished step, and settle what it cost beyond belief.

        The first of a shape teaches nothing: it may have compiled something.
        """
        last = self._last
        step = _Step(num_decodes, num_prefill_tokens, duration_s, is_beside=last.num_prefill_tokens > 0)
        self._last = step
        # What is told of a step that only decodes depends on the next one, too.
        if last.only_decodes:
            if last.is_beside or num_prefill_tokens:
                self._settle(last, paid_s=0.0)
            self._learn_decode(last, is_beside=last.is_beside or num_prefill_tokens > 0)
        if num_prefill_tokens:
            if num_decodes:
                self._settle(step, paid_s=self._paid_s.popleft() if self._paid_s else 0.0)
            shape = (num_decodes.bit_length(), num_prefill_tokens.bit_length())
            if self._knows(shape):
                self._learn_prefill(shape[1], num_prefill_tokens, max(0.0, self._extra(step)))

    def _settle(self, step: _Step, *, paid_s: float) -> None:
        # No step costs more than a window: what is compiled once must not end prefill for long.
        self._credit_s -= min(self._extra(step) - paid_s, WINDOW * self._earned(step.num_decodes))

    def _extra(self, step: _Step) -> float:
        """What it took beyond its decode rows."""
        return step.duration_s - (self._decode_cost(step.num_decodes) if step.num_decodes else 0.0)

    def _knows(self, shape: tuple[int, int]) -> bool:
        """Whether it was met before."""
        known = shape in self._seen
        self._seen.add(shape)
        return known

    def _learn_decode(self, step: _Step, *, is_beside: bool) -> None:
        """Steps beside prefill are believed only while there are no others."""
        size = step.num_decodes.bit_length()
        if self._knows((size, 0)) and not (is_beside and self._decode_s[size]):
            self._decode_s[size].append(step.duration_s)

    def _learn_prefill(self, size: int, num_tokens: int, extra_s: float) -> None:
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
        self._most_tried = max(self.min_chunk, int(2 * many))
        # Of one size alone half is taken to be for being a chunk, which has larger ones tried.
        slope_s = (many_s - few_s) / (many - few) if many > few else many_s / many / 2
        # Noise can tilt the line until one of the two costs is negative; the other then is all there is.
        self._token_s = max(min(slope_s, many_s / many), 1e-9)
        self._fixed_s = max(few_s - few * self._token_s, 0.0)

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
