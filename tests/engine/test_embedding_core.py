"""EmbeddingCore: batches in pieces, whole requests out, faults that end no others."""

from __future__ import annotations

import pytest

from embedding_script import ScriptedRunner, vector_of
from vllm_metal.engine import device_turns
from vllm_metal.engine.device_turns import DeviceTurns
from vllm_metal.engine.embedding_core import EmbeddingCore
from vllm_metal.engine.embedding_pace import EmbeddingPace
from vllm_metal.engine.embedding_request import EmbeddingInput, EmbeddingOutput, EmbeddingRequest
from vllm_metal.engine.outputs import FinishReason


def request(name: str, *token_ids: list[int]) -> EmbeddingRequest:
    return EmbeddingRequest(name, [EmbeddingInput(each) for each in token_ids])


def run(core: EmbeddingCore) -> dict[str, EmbeddingOutput]:
    outputs = {}
    while core.has_work():
        outputs |= {output.request_id: output for output in core.step()}
    return outputs


@pytest.fixture
def turns() -> DeviceTurns:
    return DeviceTurns()


def test_vectors_come_in_the_order_of_the_inputs(turns):
    core = EmbeddingCore(ScriptedRunner(), turns.join(), max_tokens=64, max_length=512)
    asked = request("one", [1] * 50, [2], [3] * 20, [4])
    core.add(asked)
    assert run(core)["one"].vectors == list(map(vector_of, asked.inputs))
    assert core.stats().prompt_tokens == asked.num_tokens


def test_requests_of_several_clients_share_batches(turns):
    runner = ScriptedRunner()
    core = EmbeddingCore(runner, turns.join(), max_tokens=64, max_length=512)
    for name in "abcd":
        core.add(request(name, [ord(name)]))
    outputs = run(core)
    assert len(runner.batches) == 1
    assert outputs["c"].vectors == [vector_of(EmbeddingInput([ord("c")]))]


def test_beside_others_pieces_and_batches_are_small(turns):
    runner = ScriptedRunner()
    core = EmbeddingCore(runner, turns.join(), max_tokens=8192, max_length=512)
    other = turns.join()
    core.add(request("alone", *[[1] * 100] * 50))
    run(core)
    largest, most = max(runner.allowances), max(map(len, runner.batches))
    other.stepped(1e-6)
    core.add(request("beside", *[[1] * 100] * 50))
    core.step()
    assert runner.allowances[-1] < largest
    assert len(runner.batches[-1]) < most
    assert len(run(core)["beside"].vectors) == 50


def test_a_client_that_leaves_is_computed_no_more(turns):
    runner = ScriptedRunner()
    core = EmbeddingCore(runner, turns.join(), max_tokens=8, max_length=512)
    core.add(request("leaves", *[[1]] * 100))
    core.add(request("stays", [5], [6]))
    core.step()
    core.abort("leaves")
    core.abort("nobody")
    outputs = run(core)
    assert outputs.keys() == {"stays"}
    assert len(runner.batches) <= 4
    assert core.stats().finished == {FinishReason.ABORT: 1, FinishReason.STOP: 1}
    assert core.stats().num_running == core.stats().num_waiting == 0


def test_a_batch_that_fails_ends_its_own_requests_only(turns):
    core = EmbeddingCore(ScriptedRunner(poison=13), turns.join(), max_tokens=8, max_length=512)
    core.add(request("bad", [13]))
    core.add(request("good", [1, 2]))
    outputs = run(core)
    assert "out of memory" in (outputs["bad"].error or "")
    assert outputs["good"].error is None
    assert len(outputs["good"].vectors) == 1


def test_batches_that_fail_on_end_are_a_failure_of_the_engine(turns):
    core = EmbeddingCore(ScriptedRunner(poison=13), turns.join(), max_tokens=8, max_length=512)
    for name in "abc":
        core.add(request(name, [13]))
    with pytest.raises(RuntimeError, match="out of memory"):
        run(core)


@pytest.fixture
def small_pieces(turns, monkeypatch) -> None:
    """Another engine steps all the time."""
    monkeypatch.setattr(device_turns, "_RECENT_S", float("inf"))
    turns.join().stepped(1e-6)


def test_a_short_text_passes_a_long_one_and_a_long_one_goes_on(turns, small_pieces):
    core = EmbeddingCore(ScriptedRunner(max_length=4096), turns.join(), max_tokens=64, max_length=4096)
    core.add(request("long", [1] * 4000))
    core.step()
    for number in range(100):
        core.add(request(f"short {number}", [number]))
        outputs = [output.request_id for _ in range(2) for output in core.step()]
        assert outputs == [f"short {number}"]
    assert core.stats().num_running == 1
    assert run(core).keys() == {"long"}


def test_what_is_not_a_number_ends_its_own_request_only(turns):
    core = EmbeddingCore(ScriptedRunner(no_number=13), turns.join(), max_tokens=64, max_length=512)
    core.add(request("bad", [1], [13], [13], [2]))
    core.add(request("good", [1], [2]))
    outputs = run(core)
    assert "not a number" in (outputs["bad"].error or "")
    assert len(outputs["good"].vectors) == 2
    assert core.stats().finished == {FinishReason.ERROR: 1, FinishReason.STOP: 1}


def test_no_input_is_padded_past_the_last_position(turns):
    core = EmbeddingCore(ScriptedRunner(max_length=49), turns.join(), max_tokens=64, max_length=49)
    core.add(request("one", [1] * 49))
    assert run(core)["one"].error is None


def test_engines_that_embed_do_not_make_each_other_s_pieces_small(turns):
    runners = ScriptedRunner(), ScriptedRunner()
    cores = [EmbeddingCore(runner, turns.join(), max_tokens=64, max_length=512) for runner in runners]
    for _ in range(10):
        for core in cores:
            core.add(request("one", [1] * 30))
            run(core)
    assert min(runners[0].allowances[0], *runners[1].allowances) > 16


def test_leaving_while_others_pass_leaves_nothing(turns, small_pieces):
    core = EmbeddingCore(ScriptedRunner(max_length=4096), turns.join(), max_tokens=64, max_length=4096)
    core.add(request("long", [1] * 4000))
    core.step()
    core.add(request("wide", *[[2] * 16] * 3))
    core.step()
    for name in ("long", "wide"):
        core.abort(name)
    assert not core.has_work()


def test_closing_leaves_the_device_to_others(turns):
    runner = ScriptedRunner()
    core = EmbeddingCore(runner, turns.join(), max_tokens=8, max_length=512)
    core.add(request("one", [1]))
    core.step()
    core.close()
    assert runner.closed
    with turns.join() as other:
        assert other.others_step_s is None


def test_a_piece_lasts_a_part_of_others_steps():
    pace = EmbeddingPace()
    for _ in range(3):
        pace.observe(1000, 0.1)
    assert pace.allowance(0.05) < 0.5 * 0.05 * 10_000
    assert pace.allowance(None) > pace.allowance(0.05)
    assert pace.allowance(1e-9) > 0
