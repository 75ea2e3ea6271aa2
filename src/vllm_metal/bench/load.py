"""What a benchmark sends, and when: the same for the same seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from vllm_metal.bench.words import WORDS


@dataclass(frozen=True, slots=True)
class Prompt:
    """`shared` is what all prompts of the load begin with; `send_at_s` counts from the start of the load."""

    shared: str
    text: str
    max_tokens: int
    send_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Each request draws one of `input_words` and one of `output_len`.

    `request_rate` is the mean of requests a second, infinite for all at once; `max_concurrency` None means no
    limit. `warmup` requests of the same mix go first and are not counted.
    """

    num_prompts: int
    input_words: tuple[int, ...]
    output_len: tuple[int, ...]
    shared_prefix_words: int = 0
    request_rate: float = math.inf
    max_concurrency: int | None = None
    warmup: int = 0
    seed: int = 0

    def prompts(self) -> list[Prompt]:
        return self._draw("run", self.num_prompts)

    def warmup_prompts(self) -> list[Prompt]:
        """Other prompts than those of the run, so that they leave no prefix of it in a cache."""
        return self._draw("warmup", self.warmup)

    def _draw(self, part: str, count: int) -> list[Prompt]:
        source = random.Random(f"{part} {self.seed}")
        shared = _text(source, self.shared_prefix_words)
        prompts, send_at_s = [], 0.0
        for number in range(count):
            words = _text(source, source.choice(self.input_words) - 1)
            # Numbered in front: no two prompts begin alike, unless a shared prefix is asked for.
            text = f"{number} {words}".rstrip()
            prompts.append(Prompt(shared, text, source.choice(self.output_len), send_at_s))
            if self.request_rate < math.inf:
                send_at_s += source.expovariate(self.request_rate)
        return prompts


def _text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(WORDS, k=num_words))
