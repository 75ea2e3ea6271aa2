"""Deals each step's token budget to requests. Pure bookkeeping: no MLX, no text, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm_metal.engine.kv_cache_manager import KVCacheManager
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.request import Request, RequestStatus


@dataclass(slots=True)
class SchedulerOutput:
    """One step: how many tokens each request computes, and whose KV the runner must drop first."""

    num_scheduled_tokens: dict[Request, int] = field(default_factory=dict)
    dropped: list[Request] = field(default_factory=list)


class Scheduler:
    """First come, first served, under a token budget. There are no phases.

    Running requests are dealt first: decodes, then prompts under way. What is left admits requests from the
    head of `waiting`. When the KV of a running request cannot grow, the newest running request is preempted:
    its KV is dropped and it goes back to the head of `waiting`, to be computed again.
    """

    def __init__(self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        # Every running request must be able to decode in every step.
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._dropped: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._dropped)

    def schedule(self) -> SchedulerOutput:
        budget = self.max_num_batched_tokens
        scheduled: dict[Request, int] = {}

        for request in sorted(self.running, key=lambda running: running.num_remaining_tokens > 1):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago, for the sake of an older one
            num_tokens = min(request.num_remaining_tokens, budget)
            if num_tokens and self._allocate(request, scheduled):
                scheduled[request] = num_tokens
                budget = self.max_num_batched_tokens - sum(scheduled.values())

        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            num_tokens = min(request.num_remaining_tokens, budget)
            # The whole prompt must fit, else prompts half done would preempt each other for ever.
            if not self.kv.allocate(request, request.num_tokens):
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            scheduled[request] = num_tokens
            budget -= num_tokens

        assert budget >= 0
        assert len(self.running) <= self.max_num_seqs
        dropped, self._dropped = self._dropped, []
        return SchedulerOutput(scheduled, dropped)

    def update_from_output(self, output: SchedulerOutput, sampled: dict[Request, int]) -> None:
        """Count the step's tokens as computed and append each sampled token to its request."""
        for request, num_tokens in output.num_scheduled_tokens.items():
            request.num_computed_tokens += num_tokens
        for request, token_id in sampled.items():
            request.token_ids.append(token_id)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End `request` in whatever state it is and give its memory back. Ending it twice is harmless."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._drop(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def preempt_all(self) -> None:
        """Have every running request computed again from its first token."""
        while self.running:
            self._preempt(self.running[-1])

    def _allocate(self, request: Request, scheduled: dict[Request, int]) -> bool:
        """KV for all its tokens, preempting from the newest; false if `request` was itself the newest."""
        while not self.kv.allocate(request, request.num_tokens):
            victim = self.running[-1]
            scheduled.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._drop(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _drop(self, request: Request) -> None:
        self.kv.free(request)
        self._dropped.append(request)
