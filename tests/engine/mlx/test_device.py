"""Threads that use MLX come and go with the models they run."""

from __future__ import annotations

import threading

import mlx.core as mx
import psutil

from vllm_metal.engine.mlx import device


def compute(results: list[float]) -> None:
    device.select("cpu")
    results.append(mx.arange(1000).sum().item())
    device.leave_thread()


def run(num_threads: int) -> int:
    """Some at a time, until all have ended. Returns how many threads there are then."""
    results: list[float] = []
    threads = [threading.Thread(target=compute, args=(results,)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [999 * 500] * num_threads
    return psutil.Process().num_threads()


def test_a_thread_that_has_left_leaves_none_of_mlx_behind() -> None:
    before = run(3)
    # Three at once may have become that only later.
    assert max([run(3) for _ in range(10)]) <= before + 2
    assert max([run(1) for _ in range(10)]) <= before + 2
