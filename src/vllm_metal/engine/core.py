"""The engine without a thread: deterministic, driven by `step`. One request's fault ends that request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vllm_metal.engine.device_turns import DeviceTurns, Turn
from vllm_metal.engine.measurements import Measurements
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.outputs import EngineStats, FinishReason, Progress, RequestOutput, TokenLogprobs
from vllm_metal.engine.request import Request, RequestStatus
from vllm_metal.engine.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)


class PromptLogprobs(NamedTuple):
    """Of a prompt's tokens from position `start` on."""

    start: int
    tokens: list[TokenLogprobs]


@dataclass(slots=True)
class ModelRunnerOutput:
    """A token for every request that is now fully computed, or what went wrong with that request alone."""

    token_ids: dict[Request, int] = field(default_factory=dict)
    logprobs: dict[Request, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[Request, PromptLogprobs] = field(default_factory=dict)
    errors: dict[Request, str] = field(default_factory=dict)


class LaunchedStep(Protocol):
    """A step that the device computes."""

    def sample(self) -> None:
        """Start the sampling; no token of a request with a grammar may be pending. Raises as `read` does."""

    def read(self) -> ModelRunnerOutput:
        """Wait for it. Raises when the step failed as a whole."""


class ModelRunner(Protocol):
    """Computes steps, in order. A token that one needs may have yet to be sampled by the one before."""

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start a step, up to its sampling. Raises when it fails as a whole."""

    def reset(self) -> None:
        """Drop the KV of all requests."""

    def rest(self) -> None:
        """Give back memory that only makes the next step quicker, and what the scheduler has given up."""

    def close(self) -> None:
        """Drop every array, on the thread that made them."""


@dataclass(slots=True)
class _Flight:
    """A step between launch and reading."""

    scheduled: SchedulerOutput
    step: LaunchedStep
    launched_at_s: float
    sampled: bool = False

    @property
    def only_begins_answers(self) -> bool:
        """Whether it gives tokens, each of them the first of an answer."""
        answering = [each for each in self.scheduled.num_scheduled_tokens if each.num_pending_tokens]
        return bool(answering) and not any(each.num_output_tokens for each in answering)


class EngineCore:
    """With `overlap` each step is launched before the tokens of the one before are read, so that the device
    computes while text is made, unless those only begin answers; without, it is the plain loop that the other
    must agree with. Where a grammar needs those tokens, only the sampling waits for them. When other engines
    want the device it goes on as the plain loop, a step a turn.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        output_processor: OutputProcessor,
        *,
        overlap: bool = False,
        turn: Turn | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.output_processor = output_processor
        self.overlap = overlap
        self._turn = turn or DeviceTurns().join()
        self._kv_budget_bytes = scheduler.kv.budget_bytes
        self._measurements = Measurements()
        self._requests: dict[str, Request] = {}
        self._in_flight: _Flight | None = None
        self._recomputing: set[Request] = set()
        self._read_at_s = 0.0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def add_request(self, request: Request) -> None:
        self.output_processor.add(request)
        self._requests[request.request_id] = request
        self.scheduler.add(request)
        if (needed_bytes := self._kv_bytes(request)) > self.scheduler.kv.budget_bytes:
            self.scheduler.kv.set_budget(needed_bytes)

    def abort_request(self, request_id: str) -> None:
        """End a request whose client has gone; unknown and finished ones are ignored."""
        if request := self._requests.get(request_id):
            self._finish(request, FinishReason.ABORT)

    def progress(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """How far those of `request_ids` have come that have no token yet."""
        requests = [self._requests[each] for each in request_ids if each in self._requests]
        return [
            RequestOutput(
                request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                progress=Progress(self.scheduler.queue_place(request), request.num_computed_tokens),
            )
            for request in requests
            if request.num_output_tokens == 0
        ]

    def set_kv_budget(self, num_bytes: int) -> None:
        """How much KV may take from now on. What is held comes to no grief: the longest request fits."""
        self._kv_budget_bytes = num_bytes
        self._fit_kv_budget()
        if not self.scheduler.has_work():  # so no step will drop what is no longer kept
            self._turn.take()
            self.runner.launch(SchedulerOutput())
            if self._in_flight is None:
                self._turn.give()

    def pause(self) -> None:
        """To be called when there is no work: others may have the device."""
        self._turn.give()

    def rest(self) -> None:
        """To be called when there has been no work for a while: give back memory that makes work quicker."""
        self._turn.take()
        self.scheduler.kv.trim()
        self.runner.rest()
        self._turn.give()

    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Launch a step, read one, and say what came of it.

        When a step fails, its requests are computed again. Raises if one fails again before it got a token.
        """
        self._turn.take()
        try:
            computed = self._compute()
        except Exception:
            self._recover()
            return []
        for request, (start, tokens) in computed.prompt_logprobs.items():
            # A step that was launched before its request was preempted may tell the same again.
            request.prompt_logprobs[start - 1 : start - 1 + len(tokens)] = tokens
        outputs = [
            self._token(request, token_id, computed.logprobs.get(request))
            for request, token_id in computed.token_ids.items()
        ]
        outputs += [self._error(request, error) for request, error in computed.errors.items()]
        if self._in_flight and not self._in_flight.sampled:
            try:
                self._sample(self._in_flight)
            except Exception:
                self._recover()
        if self._in_flight is None and self._turn.wanted:
            self._turn.give()
        return [output for output in outputs if output is not None]

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
            prefix_query_tokens=self.scheduler.num_prefix_query_tokens,
            prefix_hit_tokens=self.scheduler.num_prefix_hit_tokens,
            busy_s=self._measurements.busy_s,
            finished=dict(self._measurements.finished),
            distributions=self._measurements.distributions(),
        )

    def close(self) -> None:
        self._in_flight = None
        try:
            self.runner.close()
        finally:
            self._turn.leave()

    def _compute(self) -> ModelRunnerOutput:
        """Launch a step and read one: the one before, if the device is ours alone."""
        is_alone = self.overlap and not self._turn.wanted
        flight, self._in_flight = self._in_flight, None
        # Whoever waits for a first token would wait for the next launch as well, which takes the host longer
        # than the device where kernels are short. Where others decode meanwhile, staying ahead is worth more.
        if is_alone and not (flight and flight.only_begins_answers):
            self._in_flight = self._launch()
        elif flight is None:
            flight = self._launch()
        return self._read(flight) if flight else ModelRunnerOutput()

    def _launch(self) -> _Flight | None:
        scheduled = self.scheduler.schedule()
        if not (scheduled.num_scheduled_tokens or scheduled.dropped):
            return None
        # Before and not after: on the CPU, launching waits for most of the step.
        launched_at_s = time.perf_counter()
        self._measurements.started(scheduled.num_scheduled_tokens, launched_at_s)
        flight = _Flight(scheduled, self.runner.launch(scheduled), launched_at_s)
        self.scheduler.update_from_output(scheduled)
        if not any(
            request.matcher and request.num_pending_tokens for request in scheduled.num_scheduled_tokens
        ):
            self._sample(flight)
        return flight

    def _sample(self, flight: _Flight) -> None:
        flight.step.sample()
        self.scheduler.update_from_sampling(flight.scheduled)
        flight.sampled = True

    def _recover(self) -> None:
        """Have all be computed again after a failed step. Raises the error that is being handled if that
        cannot help.
        """
        running = set(self.scheduler.running)
        if not running or running & self._recomputing:
            raise
        # Out of memory is the usual cause, and dropping all KV its usual cure.
        logger.exception("a step failed; computing its requests again")
        self._recomputing = running
        self._in_flight = None
        self.scheduler.preempt_all()
        self.runner.reset()

    def _read(self, flight: _Flight) -> ModelRunnerOutput:
        computed = flight.step.read()
        now_s = time.perf_counter()
        # It began when the device was done with the step before, or when it was launched.
        duration_s = now_s - max(flight.launched_at_s, self._read_at_s)
        scheduled = flight.scheduled
        self.scheduler.pace.observe(scheduled.num_decodes, scheduled.num_prefill_tokens, duration_s)
        self._turn.stepped(duration_s)
        self._measurements.stepped(sum(scheduled.num_scheduled_tokens.values()), duration_s)
        self._read_at_s = now_s
        self._num_steps += 1
        return computed

    def _token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput | None:
        """None for a request that has ended since its step was launched."""
        if request.status is RequestStatus.FINISHED:
            return None
        request.num_pending_tokens -= 1
        self._recomputing.discard(request)
        self._measurements.got_token(request, self._read_at_s)
        if request.max_tokens:
            request.token_ids.append(token_id)
            self._generation_tokens += 1
            if request.matcher:
                request.matcher.advance(token_id)
                if request.matcher.error:
                    return self._error(request, request.matcher.error)
            output = self.output_processor.process(request, token_id, logprobs)
        else:  # Only the prompt was of interest.
            output = self.output_processor.end(request, FinishReason.LENGTH)
        if request.num_output_tokens <= 1:
            self._prompt_tokens += request.num_prompt_tokens
            output.prompt_logprobs = tuple(request.prompt_logprobs)
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)
        return output

    def _error(self, request: Request, error: str) -> RequestOutput | None:
        if request.status is RequestStatus.FINISHED:
            return None
        output = self.output_processor.end(request, FinishReason.ERROR, error)
        self._finish(request, FinishReason.ERROR)
        return output

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self._measurements.ended(request, reason)
        self.output_processor.remove(request)
        self._recomputing.discard(request)
        del self._requests[request.request_id]
        if self.scheduler.kv.budget_bytes > self._kv_budget_bytes:
            self._fit_kv_budget()

    def _fit_kv_budget(self) -> None:
        self.scheduler.kv.set_budget(
            max([self._kv_budget_bytes, *map(self._kv_bytes, self._requests.values())])
        )

    def _kv_bytes(self, request: Request) -> int:
        """What it needs by itself, at its longest."""
        return self.scheduler.kv.num_bytes(request.num_prompt_tokens + request.max_tokens)
