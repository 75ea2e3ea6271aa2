"""Time of the scheduler alone, pure Python: schedule and update of a step, in microseconds.

python bench/scheduler.py [--save-result PATH]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import provenance

from vllm_metal.bench.statistics import percentile
from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import Scheduler
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager
from vllm_metal.engine.step_pace import StepPace

TARGET_US = 250
_PROMPT_LEN, _MAX_TOKENS = 100, 100_000
_SETTLING = 50


def running(num_requests: int, *, num_waiting: int = 0) -> Scheduler:
    """A scheduler in which `num_requests` decode and `num_waiting` more wait for a place."""
    kv = SlotKVCacheManager(
        KVCacheSpec((KVLayerGroup(1),)), 1 << 40, max_num_seqs=num_requests, max_model_len=131072
    )
    scheduler = Scheduler(
        kv, max_num_seqs=num_requests, max_num_batched_tokens=2048, pace=StepPace(2.0, min_chunk=256)
    )
    for number in range(num_requests + num_waiting):
        prompt = [number] * _PROMPT_LEN
        params = SamplingParams(temperature=0.0)
        scheduler.add(Request(f"r{number}", prompt, params, max_tokens=_MAX_TOKENS, seed=0))
    while len(scheduler.running) < num_requests or any(
        request.num_remaining_tokens > 1 for request in scheduler.running
    ):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Seconds of one step's scheduling. Its tokens are then read, which takes no part."""
    begin_s = time.perf_counter()
    output = scheduler.schedule()
    scheduler.update_from_output(output)
    scheduler.update_from_sampling(output)
    duration_s = time.perf_counter() - begin_s
    for request in output.num_scheduled_tokens:
        if request.num_pending_tokens:
            request.token_ids.append(0)
            request.num_pending_tokens -= 1
    scheduler.kv.take_changes()
    scheduler.pace.observe(output.num_decodes, output.num_prefill_tokens, 0.01)
    return duration_s


CASES: dict[str, Callable[[], Scheduler]] = {
    "256 decode": lambda: running(256),
    "64 decode, 192 wait": lambda: running(64, num_waiting=192),
}


def measure(num_steps: int) -> dict[str, dict[str, float]]:
    measured = {}
    for name, make in CASES.items():
        scheduler = make()
        for _ in range(_SETTLING):
            step(scheduler)
        times_us = sorted(1e6 * step(scheduler) for _ in range(num_steps))
        measured[name] = {"median_us": percentile(times_us, 50), "p99_us": percentile(times_us, 99)}
    return measured


def main(arguments: argparse.Namespace) -> None:
    measured = measure(arguments.steps)
    for name, figures in measured.items():
        sys.stdout.write(f"{name:<22}{figures['median_us']:>9.0f} µs{figures['p99_us']:>9.0f} µs p99\n")
    if arguments.save_result is not None:
        provenance.save(arguments.save_result, target_us=TARGET_US, cases=measured)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-result", type=Path, metavar="PATH")
    main(parser.parse_args())
