"""Engines of several models in one process: one computes at a time, and all answer as they would alone."""

from __future__ import annotations

import threading
import time

import pytest

import tiny_models
from engine_driver import collect, make_core, request, run, solo
from vllm_metal.engine.core import EngineCore
from vllm_metal.engine.device_turns import DeviceTurns

PATIENCE_S = 120.0


class Device:
    """What only one engine at a time may have work on."""

    def __init__(self) -> None:
        self.users: set[object] = set()

    def watch(self, core: EngineCore) -> None:
        launch, read = core.runner.launch, core._read

        def launched(output):
            self.users.add(core)
            assert self.users == {core}
            return launch(output)

        def was_read(flight):
            computed = read(flight)
            if core._in_flight is None:
                self.users.discard(core)
            return computed

        core.runner.launch, core._read = launched, was_read


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("names", [("llama", "qwen3"), ("llama", "mamba2", "gemma3_text")])
def test_engines_that_share_a_device_answer_as_they_do_alone(names, overlap):
    turns, device = DeviceTurns(), Device()
    prompts = [[5, 6, 7], [9] * 70, [250, 3]]
    answers: dict[str, dict[str, list[int]]] = {}
    failures: list[BaseException] = []
    started = threading.Barrier(len(names))

    def engine(name: str) -> None:
        try:
            core = make_core(tiny_models.make(name), overlap=overlap, turn=turns.join())
            device.watch(core)
            started.wait(PATIENCE_S)
            requests = [request(str(i), prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
            told = run(core, requests, steps_between=2)
            core.rest()
            answers[name] = {each: answer.token_ids for each, answer in told.items()}
        except BaseException as exc:
            failures.append(exc)
            started.abort()

    threads = [threading.Thread(target=engine, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures
    for name in names:
        model = tiny_models.make(name)
        for i, prompt in enumerate(prompts):
            wanted = solo(model, request(str(i), prompt, max_tokens=30)).token_ids
            assert answers[name][str(i)] == wanted


def test_alone_it_keeps_its_turn_from_step_to_step_and_stays_one_ahead():
    turn = DeviceTurns().join()
    core = make_core(tiny_models.make("llama"), overlap=True, turn=turn)
    core.add_request(request("r", [1, 2, 3], max_tokens=5))
    for _ in range(3):
        core.step()
        assert turn._is_taken
    assert core._in_flight is not None
    while core.has_work():
        core.step()
    core.rest()
    assert not turn._is_taken


def test_a_step_s_time_leaves_the_waiting_out():
    turns = DeviceTurns()
    core = make_core(tiny_models.make("llama"), turn=turns.join())
    run(core, [request("warm up", [1, 2, 3], max_tokens=3)])
    core.rest()
    before_s = core.stats().busy_s
    core.add_request(request("r", [1, 2, 3], max_tokens=1))
    other, given_s = turns.join(), []
    other.take()

    def give() -> None:
        given_s.append(time.perf_counter())
        other.give()

    threading.Timer(0.2, give).start()
    core.step()
    assert core.stats().busy_s - before_s <= time.perf_counter() - given_s[0]


@pytest.mark.parametrize("mode", ["fused", "split"])
def test_a_budget_that_shrinks_does_no_harm_to_what_runs(mode):
    model = tiny_models.make("llama")
    prompts = [[5, 6, 7], [9] * 300, [250, 3] * 40]
    core = make_core(model, mode=mode)
    answers = {}
    requests = [request(str(i), prompt, max_tokens=40) for i, prompt in enumerate(prompts)]
    for each in requests:
        core.add_request(each)
    for _ in range(8):
        collect(core.step(), answers)
    core.set_kv_budget(0)
    late = request("late", [4, 4, 4], max_tokens=600)
    core.add_request(late)
    while core.has_work():
        collect(core.step(), answers)
        core.scheduler.kv.check()
    for each, prompt in zip(requests, prompts, strict=True):
        wanted = solo(model, request("r", prompt, max_tokens=40), mode=mode).token_ids
        assert answers[each.request_id].token_ids == wanted
    assert len(answers["late"].token_ids) == 600
    assert core.stats().kv_budget_bytes == core.stats().kv_used_bytes == 0


@pytest.mark.parametrize("mode", ["fused", "split"])
def test_an_idle_engine_gives_back_what_it_kept_at_once(mode):
    core = make_core(tiny_models.make("llama"), mode=mode)
    run(core, [request("r", [1] * 300, max_tokens=2)])
    arrays = core.runner._arrays._segments if mode == "fused" else core.runner._snapshots
    assert arrays
    core.set_kv_budget(0)
    assert not arrays


def test_an_engine_whose_last_step_is_under_way_gives_back_what_it_kept():
    turn = DeviceTurns().join()
    core = make_core(tiny_models.make("llama"), mode="fused", overlap=True, turn=turn)
    core.add_request(request("r", [1] * 300, max_tokens=2))
    while core.scheduler.has_work():
        core.step()
    assert core._in_flight is not None
    core.set_kv_budget(0)
    assert turn._is_taken
    while core.has_work():
        core.step()
    assert not core.runner._arrays._segments
    assert not core.runner._arrays.arrays
