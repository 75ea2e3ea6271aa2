"""Deals each step's token budget to requests. Pure bookkeeping: no MLX, no text, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_metal.engine.kv_cache_manager import KVCacheManager
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.request import Request, RequestStatus
from vllm_metal.engine.step_pace import StepPace

#: Most tokens a step of prompts whose log probabilities are asked for: each takes a row over the vocabulary.
MAX_PROMPT_LOGPROBS = 512


@dataclass(slots=True)
class SchedulerOutput:
    """One step: how many tokens each request computes, and whose KV the runner must drop first."""

    num_scheduled_tokens: dict[Request, int] = field(default_factory=dict)
    dropped: list[Request] = field(default_factory=list)

    @property
    def num_decodes(self) -> int:
        return sum(num_tokens == 1 for num_tokens in self.num_scheduled_tokens.values())

    @property
    def num_prefill_tokens(self) -> int:
        return sum(num_tokens for num_tokens in self.num_scheduled_tokens.values() if num_tokens > 1)


class Scheduler:
    """Deals tokens under a budget. There are no phases.

    Requests with one token to compute come first, in every step. What the budget and `pace` leave goes to
    prompts, under way or waiting alike: the higher priority first, then the shortest remainder, where waiting
    makes a remainder count for less, so that no one waits for ever. When the KV of a running request cannot
    grow, the one of lowest priority, the newest among equals, is preempted: its KV is dropped and it waits to
    be computed again. With a `chunk_grain` above 1, for devices that compile attention for each new shape,
    what is cut off a prompt is a power of two that divides the position where it ends, once the position
    where it begins is a multiple of the grain.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pace: StepPace,
        chunk_grain: int = 1,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        # Every running request must be able to decode in every step.
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.pace = pace
        self.chunk_grain = chunk_grain
        # Where shapes are dear so is every chunk, and what others leave only finishes prompts.
        self._least_rest = pace.min_chunk if chunk_grain == 1 else self.max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._num_steps = 0
        self._dropped: list[Request] = []

    def add(self, request: Request) -> None:
        request.arrival_step = self._num_steps
        self.waiting.append(request)
        self.kv.expect(request)

    def queue_place(self, request: Request) -> int:
        """1 for the next that is admitted, 0 for one that runs."""
        if request.status is not RequestStatus.WAITING:
            return 0
        return 1 + sum(self._rank(other) < self._rank(request) for other in self.waiting)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._dropped)

    def schedule(self) -> SchedulerOutput:
        self._num_steps += 1
        output = SchedulerOutput()
        for request in list(self.running):
            # One that was preempted a moment ago runs no more.
            preempted = request.status is not RequestStatus.RUNNING
            if request.num_remaining_tokens == 1 and not preempted and not _is_complete(request):
                self._schedule(request, 1, output)
        self._schedule_prompts(output)
        output.dropped, self._dropped = self._dropped, []
        return output

    def update_from_output(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed."""
        for request, num_tokens in output.num_scheduled_tokens.items():
            was_prompt = request.num_computed_tokens < request.num_prompt_tokens
            request.num_computed_tokens += num_tokens
            if was_prompt:
                self.kv.store(request)

    def update_from_sampling(self, output: SchedulerOutput) -> None:
        """Count what the step samples: pending until it is read."""
        for request in output.num_scheduled_tokens:
            if request.num_remaining_tokens == 0:
                request.num_pending_tokens += 1

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End `request` in whatever state it is and give its memory back. Ending it twice is harmless."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.kv.store(request)
            self.running.remove(request)
            self._drop(request)
        else:
            self.waiting.remove(request)
            self.kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def preempt_all(self) -> None:
        """Have every running request computed again from its first token; what is pending is lost."""
        for request in list(self.running):
            self._preempt(request)
        for request in self.waiting:
            request.num_pending_tokens = 0

    def _schedule_prompts(self, output: SchedulerOutput) -> None:
        num_decodes = len(output.num_scheduled_tokens)
        budget = self.max_num_batched_tokens - num_decodes
        prompts = [request for request in (*self.running, *self.waiting) if _is_prompt(request)]
        if not prompts or not budget:
            return
        wanted = sum(request.num_remaining_tokens for request in prompts)
        budget = self.pace.allowance(num_decodes, min(wanted, budget))
        num_logprobs = 0
        admitting = True
        for request in sorted(prompts, key=self._rank):
            if not budget:
                break
            tells = request.params.prompt_logprobs is not None
            if tells and num_logprobs == MAX_PROMPT_LOGPROBS:
                continue
            if request.status is RequestStatus.WAITING:
                if self.kv.is_worth_waiting(request):
                    continue
                # Whoever cannot be admitted holds back those behind, or they would pass it for ever.
                admitting = admitting and self._admit(request)
                if not admitting:
                    continue
            most = self.kv.max_num_new_tokens(request)
            num_tokens = min(most, budget)
            if output.num_prefill_tokens and num_tokens < min(most, self._least_rest):
                continue  # What others left over is too little to be worth a chunk.
            if tells:
                num_tokens = min(num_tokens, MAX_PROMPT_LOGPROBS - num_logprobs)
            if num_tokens < most:
                num_tokens = _even(request.num_computed_tokens, num_tokens, self.chunk_grain)
            if self._schedule(request, num_tokens, output):
                budget -= num_tokens
                num_logprobs += tells * num_tokens
        self.pace.spend(num_decodes, output.num_prefill_tokens)

    def _rank(self, request: Request) -> tuple[int, int]:
        waited = self._num_steps - request.arrival_step
        ageing = self.max_num_batched_tokens // 4
        return request.params.priority, request.num_remaining_tokens - waited * ageing

    def _admit(self, request: Request) -> bool:
        if len(self.running) >= self.max_num_seqs or not self.kv.allocate(request):
            return False
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        request.num_computed_tokens = self.kv.restore(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            if request.params.reads_prefix_cache:
                self.num_prefix_query_tokens += request.num_tokens
                self.num_prefix_hit_tokens += request.num_cached_tokens
        return True

    def _schedule(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """Schedule it, preempting others for its KV; false if it had to give way itself."""
        while not self.kv.allocate(request):
            victim = max(reversed(self.running), key=lambda each: (each.params.priority, each.arrival_step))
            output.num_scheduled_tokens.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False
        output.num_scheduled_tokens[request] = num_tokens
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._drop(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.append(request)

    def _drop(self, request: Request) -> None:
        self.kv.free(request)
        self._dropped.append(request)


def _is_prompt(request: Request) -> bool:
    if request.status is RequestStatus.WAITING:
        # The token that a preempted request waits for must be known before it can be computed again.
        return not request.num_pending_tokens
    return request.num_remaining_tokens > 1


def _is_complete(request: Request) -> bool:
    """Whether its last token is sampled already, if not read."""
    return request.num_sampled_tokens >= request.max_tokens


def _even(start: int, num_tokens: int, grain: int) -> int:
    """As many of `num_tokens` from `start` on as make a chunk like others: see `Scheduler`."""
    if grain == 1:
        return num_tokens
    if behind := start % grain:
        return min(grain - behind, num_tokens)
    largest = 1 << num_tokens.bit_length() - 1
    # The largest power of two that divides it.
    return min(start & -start, largest) if start else largest
