"""What was seen of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RequestRecord:
    """Moments are those of `time.perf_counter`, in seconds.

    `arrivals_s` are the moments at which text arrived, `finished_s` that of the last chunk. The token counts
    are the server's, None where it sends none; `status` is HTTP's.
    """

    max_tokens: int
    started_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    finished_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """The server's count, else the number of chunks."""
        return len(self.arrivals_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float:
        # An answer may hold no text at all, such as half of a character.
        return (self.arrivals_s[0] if self.arrivals_s else self.finished_s) - self.started_s

    @property
    def e2el_s(self) -> float:
        return self.finished_s - self.started_s

    @property
    def itls_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None for answers of one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None
