"""What the engine thread hands out: plain values only, never an array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_metal.engine.histogram import Distribution


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of a token: natural logarithms, over the whole vocabulary.

    `top` is the most likely tokens in order, as many as were asked for, `token_id` not always among them.
    `rank` counts from 1, for the likeliest; it is told of a prompt's tokens only.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How near a first token is. `queue_place` is 1 for the request that begins next, 0 for one that has."""

    queue_place: int
    num_computed_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """News of one request since the last one: `text` and `token_ids` are deltas, the counts are totals.

    The joined `text` of all outputs is the answer. `logprobs`, if asked for, go with `token_ids`, and
    `prompt_logprobs`, from the prompt's second token on, come with the first output.
    `finish_reason` is set on the last output only, and `stop_string` with it if that was met; `error` goes
    with FinishReason.ERROR and is in the user's words.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    progress: Progress | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def merge(self, later: RequestOutput) -> None:
        """Append `later`, so that a slow reader holds one output and not a queue."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_string = later.stop_string
        self.num_cached_tokens = later.num_cached_tokens
        self.num_output_tokens = later.num_output_tokens
        self.error = later.error
        self.progress = later.progress


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot after a step, for `metal status` and metrics. `distributions` are by vLLM's names.

    Of `prefix_query_tokens`, tokens of requests that were looked up among kept prefixes, `prefix_hit_tokens`
    were found.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_used_bytes: int = 0
    kv_budget_bytes: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    busy_s: float = 0.0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    distributions: Mapping[str, Distribution] = field(default_factory=dict)
