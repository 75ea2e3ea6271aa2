"""The engine without a thread: deterministic, driven by `step`. One request's fault ends that request."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.outputs import EngineStats, FinishReason, RequestOutput
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ModelRunnerOutput:
    """A token for every request that is now fully computed, or what went wrong with that request alone."""

    token_ids: dict[Request, int] = field(default_factory=dict)
    errors: dict[Request, str] = field(default_factory=dict)


class ModelRunner(Protocol):
    """Computes a step. Raises when the step failed as a whole."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...

    def reset(self) -> None:
        """Drop the KV of all requests."""

    def close(self) -> None:
        """Drop every array, on the thread that made them."""


class EngineCore:
    def __init__(self, scheduler: Scheduler, runner: ModelRunner, output_processor: OutputProcessor) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.output_processor = output_processor
        self._requests: dict[str, Request] = {}
        self._failed_before = False
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def add_request(self, request: Request) -> None:
        self.output_processor.add(request)
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort_request(self, request_id: str) -> None:
        """End a request whose client has gone; unknown and finished ones are ignored."""
        if request := self._requests.get(request_id):
            self._finish(request, FinishReason.ABORT)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, and say what came of it. Raises when two steps running have failed."""
        scheduled = self.scheduler.schedule()
        computed = self._execute(scheduled)
        if computed is None:
            return []
        self._num_steps += 1
        self.scheduler.update_from_output(scheduled, computed.token_ids)
        self._count(computed)
        outputs = [
            self._output(request, self.output_processor.process(request, token_id))
            for request, token_id in computed.token_ids.items()
        ]
        for request, error in computed.errors.items():
            outputs.append(
                self._output(request, self.output_processor.end(request, FinishReason.ERROR, error))
            )
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_used_bytes=self.scheduler.kv.used_bytes,
            kv_budget_bytes=self.scheduler.kv.budget_bytes,
            num_steps=self._num_steps,
            num_preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    def close(self) -> None:
        self.runner.close()

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """None if the step failed and its requests are to be computed again."""
        try:
            computed = self.runner.execute(scheduled)
        except Exception:
            if self._failed_before:
                raise
            # Out of memory is the usual cause, and dropping all KV its usual cure.
            logger.exception("a step failed; computing its requests again")
            self._failed_before = True
            self.scheduler.preempt_all()
            self.runner.reset()
            return None
        self._failed_before = False
        return computed

    def _output(self, request: Request, output: RequestOutput) -> RequestOutput:
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)
        return output

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self.output_processor.remove(request)
        del self._requests[request.request_id]

    def _count(self, computed: ModelRunnerOutput) -> None:
        self._generation_tokens += len(computed.token_ids)
        self._prompt_tokens += sum(
            request.num_prompt_tokens for request in computed.token_ids if request.num_output_tokens == 1
        )
