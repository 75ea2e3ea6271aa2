"""Step times of the engine while requests leave and join a full batch: nobody's leaving may be felt.

python bench/churn.py MODEL [--batch 64] [--input-len 2048] [--save-result PATH]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import provenance

from vllm_metal import config
from vllm_metal.bench.statistics import percentile
from vllm_metal.engine.core import EngineCore, LaunchedStep, ModelRunnerOutput
from vllm_metal.engine.mlx.build import build
from vllm_metal.engine.mlx.fused_runner import FusedRunner
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import SchedulerOutput

#: Decode steps between one request's end and the next one's.
_STEPS_BETWEEN = 8
_SETTLING = 8


class WatchedRunner:
    """A runner that notes how long steps last, from the end of the one before, by what happens in them.

    `growth`: a pool of slots changes its size, whatever else happens; `join`: tokens of a prompt are
    computed; `leave`: a request's KV is let go; `decode`: nothing of all that.
    """

    def __init__(self, runner: FusedRunner) -> None:
        self.steps: list[tuple[str, float]] = []
        self._runner = runner
        self._num_slots: list[int] = []
        self._read_at_s = time.perf_counter()

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        num_slots = [pool.num_slots for pool in self._runner.kv.pools.values()]
        grows, self._num_slots = num_slots != self._num_slots, num_slots
        if grows:
            kind = "growth"
        elif output.num_prefill_tokens:
            kind = "join"
        else:
            kind = "leave" if output.dropped else "decode"
        return WatchedStep(self, self._runner.launch(output), kind)

    def read(self, step: LaunchedStep, kind: str) -> ModelRunnerOutput:
        output = step.read()
        now_s = time.perf_counter()
        self.steps.append((kind, now_s - self._read_at_s))
        self._read_at_s = now_s
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@dataclass(frozen=True, slots=True)
class WatchedStep:
    runner: WatchedRunner
    step: LaunchedStep
    kind: str

    def sample(self) -> None:
        self.step.sample()

    def read(self) -> ModelRunnerOutput:
        return self.runner.read(self.step, self.kind)


def churn(core: EngineCore, arguments: argparse.Namespace, vocab_size: int) -> list[tuple[str, float]]:
    """The steps from the moment when all decode: one request after the other ends, and a new one comes."""
    source = random.Random(0)

    def new_request(number: int, num_steps: int) -> Request:
        prompt = source.choices(range(vocab_size), k=arguments.input_len)
        params = SamplingParams(temperature=0.0, ignore_eos=True, skip_reading_prefix_cache=True)
        return Request(f"churn-{number}", prompt, params, max_tokens=num_steps, seed=0)

    settled = arguments.input_len * arguments.batch // core.scheduler.max_num_batched_tokens + _SETTLING
    for number in range(arguments.batch):
        core.add_request(new_request(number, 2 * settled + number * _STEPS_BETWEEN))
    while core.scheduler.waiting or any(each.num_remaining_tokens > 1 for each in core.scheduler.running):
        core.step()
    watched = core.runner = WatchedRunner(core.runner)
    for _ in range(_SETTLING):
        core.step()
    watched.steps.clear()
    left = 0
    while left < arguments.leaves:
        for output in core.step():
            if output.finish_reason is None:
                continue
            left += 1
            if left <= arguments.joins:
                core.add_request(new_request(arguments.batch + left, arguments.batch * _STEPS_BETWEEN))
    return watched.steps


def figures(steps: list[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Of each kind of step its number, and median and worst in ms and against the median decode step."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for kind, duration_s in steps:
        by_kind[kind].append(1000 * duration_s)
    usual_ms = percentile(sorted(by_kind["decode"]), 50)
    return {
        kind: {
            "steps": len(durations_ms),
            "median_ms": percentile(sorted(durations_ms), 50),
            "worst_ms": max(durations_ms),
            "worst_to_usual": max(durations_ms) / usual_ms,
        }
        for kind, durations_ms in sorted(by_kind.items())
    }


def main(arguments: argparse.Namespace) -> None:
    settings = config.load()
    engine = replace(settings.engine, max_num_seqs=arguments.batch, max_step_stretch=arguments.stretch)
    loaded = build(arguments.model, replace(settings, engine=engine))
    try:
        if not isinstance(loaded.core.runner, FusedRunner):
            raise SystemExit("error: this model's KV is not held in slots")
        measured = figures(churn(loaded.core, arguments, loaded.tokenizer.vocab_size))
    finally:
        loaded.core.close()
    for kind, values in measured.items():
        cells = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        sys.stdout.write(f"{kind:7} {cells}\n")
    if arguments.save_result:
        provenance.save(arguments.save_result, steps=measured)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder or `.gguf` file")
    parser.add_argument("--batch", type=int, default=64, help="requests that decode at once")
    parser.add_argument("--input-len", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--leaves", type=int, default=32, help="requests that end while the others go on")
    parser.add_argument(
        "--joins", type=int, default=16, help="of how many of those a new one takes the place"
    )
    parser.add_argument("--stretch", type=float, default=2.0, help="`max_step_stretch`")
    parser.add_argument("--save-result", type=Path, metavar="PATH", help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
