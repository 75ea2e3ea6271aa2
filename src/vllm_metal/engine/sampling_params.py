"""What a request asks of the sampler and of the end of its text."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal.api.ranges import RANGES, broken_bound
from vllm_metal.errors import InvalidRequest
from vllm_metal.structure.compiler import CompiledGrammar

#: Below it sampling is greedy.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked on creation; raises `InvalidRequest` naming the field.

    `top_k` 0 or -1 means off. `seed` None means a fresh one per request. `max_tokens` None means all that the
    context leaves. Generation ends before any of `stop` in the text and at any of `stop_token_ids`, which
    come on top of the model's own end tokens, but at none of them within the first `min_tokens`. What ended
    it is part of the text if `include_stop_str_in_output`, and special tokens are, by name, unless
    `skip_special_tokens`; those of `visible_token_ids` are in any case. A lower `priority` is served earlier.
    Only requests of one `cache_salt` share KV of texts that begin alike.

    Presence and frequency penalties look at the tokens of the answer, the repetition penalty at the prompt's
    too. `logit_bias` pairs token ids with what is added to their logits. `allowed_token_ids` None means all.
    Of each of `bad_words`, sequences of token ids, the last token never follows the others in the answer.
    The answer follows `grammar`, and ends where nothing more may follow.
    `logprobs` is how many of the most likely tokens are reported besides the one given; None means nothing.
    `prompt_logprobs` is the same for each token of the prompt but the first.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: CompiledGrammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    visible_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        def refuse(param: str, rule: str) -> None:
            got = repr(getattr(self, param))
            shortened = got if len(got) <= 80 else f"{got[:80]}…"
            raise InvalidRequest(f"`{param}` must be {rule}, got {shortened}", param=param)

        for param, allowed in RANGES.items():
            value = getattr(self, param)
            if value is not None and (rule := broken_bound(allowed, value)):
                refuse(param, rule)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("`allowed_token_ids` must name at least one", param="allowed_token_ids")
        if not all(self.bad_words):
            raise InvalidRequest("`bad_words` must not be empty", param="bad_words")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"at most `max_tokens`, which is {self.max_tokens}")
        if any(not stop for stop in self.stop):
            raise InvalidRequest("`stop` must be a non-empty string or a list of them", param="stop")

    @property
    def greedy(self) -> bool:
        """One candidate, so the draw cannot matter: temperature 0 equals top_k 1.

        At the lowest temperatures it is the same, but for logits that float32 could no longer hold.
        """
        return self.temperature < LEAST_TEMPERATURE or self.top_k == 1

    @property
    def constrained(self) -> bool:
        return bool(
            self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens or self.grammar
        )

    @property
    def penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def reads_prefix_cache(self) -> bool:
        """Kept KV says nothing of the prompt's log probabilities."""
        return self.prompt_logprobs is None and not self.skip_reading_prefix_cache

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the answer of a model whose own are `eos_token_ids`."""
        own = frozenset() if self.ignore_eos else eos_token_ids
        return own.union(self.stop_token_ids)
