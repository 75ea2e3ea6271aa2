"""Engines that share a device: one at a time, in the order of asking."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest

from vllm_metal.engine import device_turns
from vllm_metal.engine.device_turns import DeviceTurns

PATIENCE_S = 60.0


def wait_for_queue(turns: DeviceTurns, length: int) -> None:
    give_up_at_s = time.monotonic() + PATIENCE_S
    while len(turns._queue) < length:
        assert time.monotonic() < give_up_at_s


def test_one_at_a_time_and_everybody_comes_on():
    turns, inside, done = DeviceTurns(), [], []

    def engine(name: int) -> None:
        turn = turns.join()
        for _ in range(200):
            with turn:
                inside.append(name)
                assert inside == [name]
                inside.remove(name)
        turn.leave()
        done.append(name)

    threads = [threading.Thread(target=engine, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(done) == [0, 1, 2, 3]


def test_turns_go_in_the_order_of_asking():
    turns, order = DeviceTurns(), SimpleQueue()
    holder = turns.join()
    holder.take()

    def engine(name: str) -> None:
        with turns.join():
            order.put(name)

    threads = []
    for place, name in enumerate("abc", start=2):
        threads.append(threading.Thread(target=engine, args=(name,)))
        threads[-1].start()
        wait_for_queue(turns, place)
    holder.give()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [order.get(timeout=PATIENCE_S) for _ in range(3)] == ["a", "b", "c"]


def test_who_is_alone_is_never_asked_to_give():
    turn = DeviceTurns().join()
    turn.take()
    turn.take()
    assert not turn.wanted
    turn.give()
    turn.give()
    assert turn.others_step_s is None


def test_who_gives_and_asks_again_comes_after_those_that_wait():
    turns = DeviceTurns()
    greedy, other = turns.join(), turns.join()
    greedy.take()
    passed = threading.Event()

    def wait() -> None:
        with other:
            passed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for_queue(turns, 2)
    assert greedy.wanted
    greedy.give()
    greedy.take()
    assert passed.is_set()
    greedy.give()
    thread.join(PATIENCE_S)


def test_the_step_time_of_others_that_are_active(monkeypatch: pytest.MonkeyPatch):
    now_s = 100.0
    monkeypatch.setattr(device_turns.time, "monotonic", lambda: now_s)
    turns = DeviceTurns()
    batch, quick, slow = turns.join(), turns.join(), turns.join()
    quick.stepped(0.01)
    slow.stepped(0.2)
    assert batch.others_step_s == 0.2
    assert slow.others_step_s == 0.01
    now_s += 2
    quick.stepped(0.01)
    assert batch.others_step_s == 0.01
    quick.leave()
    assert batch.others_step_s is None


def test_a_turn_that_failed_is_given_too():
    turns = DeviceTurns()
    turn = turns.join()
    with pytest.raises(RuntimeError), turn:
        raise RuntimeError
    with turns.join():
        pass
