"""Measures an engine without a server, and beside it the bare loops that bound it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from vllm_metal.bench.statistics import percentile
from vllm_metal.engine.core import EngineCore, LaunchedStep, ModelRunner, ModelRunnerOutput
from vllm_metal.engine.mlx.bare_loops import BareLoop
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import SchedulerOutput
from vllm_metal.errors import EngineError

#: Steps at the beginning of a run's decoding that are not counted.
_NUM_SETTLING = 3

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` requests at once; lengths are in tokens, and each prompt's are random."""

    batch: int
    input_len: int
    output_len: int

    def prompts(self, source: random.Random, vocab_size: int) -> Prompts:
        return [source.choices(range(vocab_size), k=self.input_len) for _ in range(self.batch)]


@dataclass(slots=True)
class Run:
    """What one run took. `steps_s` are of the steps in which all requests, and only they, decode."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    steps_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    busy_s: float | None = None

    def figures(self) -> Figures:
        counted = sorted(self.steps_s[_NUM_SETTLING:])
        return Figures(
            median_step_ms=1000 * percentile(counted, 50) if counted else None,
            p99_step_ms=1000 * percentile(counted, 99) if counted else None,
            output_throughput=self.num_output_tokens / self.duration_s,
            prefill_throughput=self.num_prompt_tokens / self.prefill_s if self.prefill_s else None,
            busy_share=None if self.busy_s is None else self.busy_s / self.duration_s,
            cpu_s=self.cpu_s,
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Throughputs are in tokens a second; None where nothing was measured.

    A step lasts from the end of the one before to its own. `output_throughput` is over the whole run, prefill
    included; `prefill_throughput` counts the prompts' tokens alone, over the steps that hold some.
    `busy_share` is the share of the run in which the runner launches or reads a step.
    """

    median_step_ms: float | None
    p99_step_ms: float | None
    output_throughput: float
    prefill_throughput: float | None
    busy_share: float | None
    cpu_s: float

    def against(self, other: Figures) -> Figures:
        """How many times as good as `other`: above 1 is faster, or cheaper."""
        return Figures(
            median_step_ms=_ratio(other.median_step_ms, self.median_step_ms),
            p99_step_ms=_ratio(other.p99_step_ms, self.p99_step_ms),
            output_throughput=self.output_throughput / other.output_throughput,
            prefill_throughput=_ratio(self.prefill_throughput, other.prefill_throughput),
            busy_share=None,
            cpu_s=other.cpu_s / self.cpu_s,
        )


#: Which contender is compared with which.
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """`rounds` hold the figures of each contender."""

    work: Work
    rounds: list[dict[str, Figures]]
    pairs: list[Pair]

    @property
    def medians(self) -> dict[str, Figures]:
        return {name: _medians([figures[name] for figures in self.rounds]) for name in self.rounds[0]}

    @property
    def ratios(self) -> dict[Pair, Figures]:
        """Of each pair, the median of how the first was against the second in each round."""
        return {
            (name, other): _medians([figures[name].against(figures[other]) for figures in self.rounds])
            for name, other in self.pairs
        }


Contender = Callable[[Work, Prompts], Run]


def measure(
    work: Work,
    contenders: Mapping[str, Contender],
    pairs: list[Pair],
    *,
    vocab_size: int,
    rounds: int,
    on_run: Callable[[str, int, Figures], None],
) -> Result:
    """Let the contenders take turns, each time with prompts of their own."""
    measured = []
    for number in range(rounds):
        figures = {}
        # Whoever goes first in one round goes last in the next.
        for name in list(contenders) if number % 2 == 0 else reversed(list(contenders)):
            prompts = work.prompts(random.Random(f"{name} {number} {work}"), vocab_size)
            figures[name] = contenders[name](work, prompts).figures()
            on_run(name, number, figures[name])
        measured.append({name: figures[name] for name in contenders})
    return Result(work, measured, pairs)


def engine_contender(core: EngineCore, params: SamplingParams) -> Contender:
    """All requests are added at once and the engine stepped until they have ended."""

    def run(work: Work, prompts: Prompts) -> Run:
        requests = [
            Request(f"bench-{row}", prompt, params, max_tokens=work.output_len, seed=row)
            for row, prompt in enumerate(prompts)
        ]
        runner, timed = core.runner, _TimedRunner(core.runner)
        run, cpu_s = Run(), time.process_time()
        core.runner = timed
        try:
            for request in requests:
                core.add_request(request)
            while core.has_work():
                for output in core.step():
                    if output.error is not None:
                        raise EngineError(f"a request failed: {output.error}")
                    run.num_output_tokens += len(output.token_ids)
        finally:
            core.runner = runner
        run.duration_s = time.perf_counter() - timed.started_s
        run.cpu_s = time.process_time() - cpu_s
        run.busy_s = timed.busy_s
        for step in timed.steps:
            if step.num_prefill_tokens:
                run.num_prompt_tokens += step.num_prefill_tokens
                run.prefill_s += step.duration_s
            elif step.num_decodes == work.batch:
                run.steps_s.append(step.duration_s)
        return run

    return run


def loop_contender(loop: BareLoop) -> Contender:
    def run(work: Work, prompts: Prompts) -> Run:
        run, cpu_s, started_s = Run(), time.process_time(), time.perf_counter()
        loop.prefill(prompts, work.output_len)
        read_at_s = time.perf_counter()
        run.num_prompt_tokens = work.batch * (work.input_len - 1)
        run.prefill_s = read_at_s - started_s
        for token_ids in loop.decode(work.output_len):
            now_s = time.perf_counter()
            run.steps_s.append(now_s - read_at_s)
            run.num_output_tokens += len(token_ids)
            read_at_s = now_s
        run.duration_s = read_at_s - started_s
        run.cpu_s = time.process_time() - cpu_s
        loop.drop()
        return run

    return run


@dataclass(frozen=True, slots=True)
class _Step:
    num_decodes: int
    num_prefill_tokens: int
    duration_s: float


class _TimedRunner:
    """A runner that notes what its steps hold and how long they take."""

    def __init__(self, runner: ModelRunner) -> None:
        self.steps: list[_Step] = []
        self.busy_s = 0.0
        self.started_s = self._read_at_s = time.perf_counter()
        self._runner = runner

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        begin_s = time.perf_counter()
        step = self._runner.launch(output)
        self.busy_s += time.perf_counter() - begin_s
        return _TimedStep(self, step, output.num_decodes, output.num_prefill_tokens)

    def sample(self, step: _TimedStep) -> None:
        begin_s = time.perf_counter()
        step.step.sample()
        self.busy_s += time.perf_counter() - begin_s

    def read(self, step: _TimedStep) -> ModelRunnerOutput:
        begin_s = time.perf_counter()
        computed = step.step.read()
        now_s = time.perf_counter()
        self.busy_s += now_s - begin_s
        self.steps.append(_Step(step.num_decodes, step.num_prefill_tokens, now_s - self._read_at_s))
        self._read_at_s = now_s
        return computed

    def reset(self) -> None:
        self._runner.reset()

    def rest(self) -> None:
        self._runner.rest()

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True, slots=True)
class _TimedStep:
    runner: _TimedRunner
    step: LaunchedStep
    num_decodes: int
    num_prefill_tokens: int

    def sample(self) -> None:
        self.runner.sample(self)

    def read(self) -> ModelRunnerOutput:
        return self.runner.read(self)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def _medians(rounds: list[Figures]) -> Figures:
    """Figure by figure; None where a round has none."""
    middle: dict[str, Any] = {}
    for name in asdict(rounds[0]):
        values = [getattr(figures, name) for figures in rounds]
        middle[name] = None if None in values else median(values)
    return Figures(**middle)
