"""What a request asks of the sampler and of the end of its text."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked on creation; raises `InvalidRequest` naming the field.

    `top_k` 0 or -1 means off. `seed` None means a fresh one per request. `max_tokens` None means all that the
    context leaves. Generation ends before any of `stop` in the text and at any of `stop_token_ids`, which
    come on top of the model's own end tokens. A lower `priority` is served
    earlier. Only requests of one `cache_salt` share KV of texts that begin alike.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        def refuse(param: str, rule: str) -> None:
            got = repr(getattr(self, param))
            shortened = got if len(got) <= 80 else f"{got[:80]}…"
            raise InvalidRequest(f"`{param}` must be {rule}, got {shortened}", param=param)

        # The comparisons are written so that NaN is refused too.
        if not 0.0 <= self.temperature <= 100.0:
            refuse("temperature", "between 0 and 100")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "above 0 and at most 1")
        if self.top_k < -1:
            refuse("top_k", "-1 or 0 (off), or a positive number")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", "at least 1")
        if any(not stop for stop in self.stop):
            raise InvalidRequest("`stop` must be a non-empty string or a list of them", param="stop")

    @property
    def greedy(self) -> bool:
        """One candidate, so the draw cannot matter: temperature 0 equals top_k 1."""
        return self.temperature == 0.0 or self.top_k == 1
