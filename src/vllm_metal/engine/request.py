"""A request inside the engine. Owned by the engine thread."""

from __future__ import annotations

import time
from enum import Enum, auto

from vllm_metal.engine.outputs import FinishReason, TokenLogprobs
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.structure.matcher import Matcher


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """Tokens asked and answered, and how many of them have their KV computed.

    `num_computed_tokens` chases `num_tokens`: prefill, a chunk of it, decode and going on after a preemption
    are all the same subtraction. Tokens that are sampled but not read yet count as `num_pending_tokens` and
    have no id. `prompt_logprobs` are those known, from the prompt's second token on. `seed` is set for
    requests that gave none too, so that a preempted one goes on as it began. `matcher` is where the answer's
    known tokens stand in the grammar that it must follow, if any. `adapter` counts those of the model from 1;
    0 means none. Times are `perf_counter`'s.
    """

    __slots__ = (
        "adapter",
        "arrival_step",
        "arrived_s",
        "finish_reason",
        "first_token_s",
        "last_token_s",
        "matcher",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "prompt_logprobs",
        "request_id",
        "seed",
        "started_s",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        matcher: Matcher | None = None,
        adapter: int = 0,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.max_tokens = max_tokens
        self.seed = seed
        self.matcher = matcher
        self.adapter = adapter
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.arrival_step = 0
        self.arrived_s = time.perf_counter()
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def kv_salt(self) -> tuple[str | None, int]:
        """Only requests that have the same share KV of texts that begin alike."""
        return self.params.cache_salt, self.adapter

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of the answer, those that are pending among them."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens, {self.num_output_tokens} out)"
        )
