"""EngineCore over a runner whose tokens and faults are scripted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine_driver import IdDetokenizer, collect, request
from vllm_metal.engine.core import EngineCore, ModelRunnerOutput
from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.rectangular_kv_cache_manager import RectangularKVCacheManager
from vllm_metal.engine.scheduler import Scheduler
from vllm_metal.engine.step_pace import StepPace

EOS = 2


@dataclass
class ScriptedStep:
    computed: ModelRunnerOutput
    number: int
    log: list[str]

    def sample(self) -> None:
        pass

    def read(self) -> ModelRunnerOutput:
        self.log.append(f"read {self.number}")
        return self.computed


class ScriptedRunner:
    """Writes each request's script, token by token; raises in the steps named by `fails_in`."""

    def __init__(self, scripts: dict[str, str], fails_in: set[int] = frozenset()) -> None:
        self.scripts = scripts
        self.fails_in = fails_in
        self.num_steps = 0
        self.num_resets = 0
        self.dropped: list[str] = []
        self.log: list[str] = []

    def launch(self, output):
        self.num_steps += 1
        self.log.append(f"launch {self.num_steps}")
        if self.num_steps in self.fails_in:
            raise RuntimeError("out of memory")
        self.dropped += [request.request_id for request in output.dropped]
        computed = ModelRunnerOutput()
        for each, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens < each.num_remaining_tokens:
                continue
            script = self.scripts[each.request_id]
            # One step ahead it is asked for what comes after the end, too.
            if each.num_sampled_tokens >= len(script):
                computed.token_ids[each] = EOS
            elif script[each.num_sampled_tokens] == "\0":
                computed.errors[each] = "not a number"
            else:
                computed.token_ids[each] = ord(script[each.num_sampled_tokens])
        return ScriptedStep(computed, self.num_steps, self.log)

    def reset(self) -> None:
        self.num_resets += 1

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def make_core(request):
    def make(scripts: dict[str, str], *, fails_in: set[int] = frozenset()) -> EngineCore:
        kv = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), 1 << 40)
        scheduler = Scheduler(
            kv, max_num_seqs=4, max_num_batched_tokens=16, pace=StepPace(100.0, min_chunk=1)
        )
        processor = OutputProcessor(IdDetokenizer, frozenset({EOS}))
        return EngineCore(scheduler, ScriptedRunner(scripts, fails_in), processor, overlap=request.param)

    return make


def answer(core: EngineCore, *requests):
    answers = {}
    for each in requests:
        core.add_request(each)
    while core.has_work():
        collect(core.step(), answers)
    return answers


def test_the_end_token_ends_the_text_and_is_not_shown(make_core):
    answers = answer(make_core({"r": "Hi."}), request("r", [1]))
    assert answers["r"].text == "Hi."
    assert answers["r"].last.finish_reason is FinishReason.STOP
    assert answers["r"].last.num_output_tokens == 4


def test_max_tokens_ends_it_as_length(make_core):
    answers = answer(make_core({"r": "Hello"}), request("r", [1], max_tokens=3))
    assert answers["r"].text == "Hel"
    assert answers["r"].last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (("lo w",), "Hel", FinishReason.STOP),
        (("o", "world"), "Hell", FinishReason.STOP),
        (("xyz", "worlds"), "Hello world", FinishReason.LENGTH),
    ],
)
def test_stop_strings(make_core, stop, text, reason):
    answers = answer(make_core({"r": "Hello world!"}), request("r", [1], max_tokens=11, stop=stop))
    assert answers["r"].text == text
    assert answers["r"].last.finish_reason is reason


def test_stop_token_ids_and_ignore_eos(make_core):
    asked = request("r", [1], stop_token_ids=(ord("w"),))
    assert answer(make_core({"r": "Hello world"}), asked)["r"].text == "Hello "
    asked = request("r", [1], max_tokens=4, ignore_eos=True)
    answers = answer(make_core({"r": "ab" + chr(EOS) + "c"}), asked)
    assert answers["r"].token_ids == [ord("a"), ord("b"), EOS, ord("c")]


def test_a_fault_of_one_request_ends_that_one_only(make_core):
    core = make_core({"bad": "ab\0", "good": "hello"})
    answers = answer(core, request("bad", [1]), request("good", [1]))
    assert answers["bad"].last.finish_reason is FinishReason.ERROR
    assert answers["bad"].last.error == "not a number"
    assert answers["bad"].text == "ab"
    assert answers["good"].text == "hello"


def test_a_failed_step_is_computed_again(make_core, caplog):
    core = make_core({"r": "hello", "s": "world"}, fails_in={3})
    answers = answer(core, request("r", [1, 2, 3]), request("s", [4]))
    assert answers["r"].text == "hello"
    assert answers["s"].text == "world"
    assert core.runner.num_resets == 1
    assert "computing its requests again" in caplog.text


@pytest.mark.parametrize("prompt", [[1], [1] * 40])
def test_a_request_that_fails_again_before_it_got_a_token_is_raised(make_core, prompt):
    """Also where the chunks before its last one are computed without a fault."""
    last_chunk = -(-len(prompt) // 16)
    core = make_core({"r": "hello"}, fails_in={last_chunk, 2 * last_chunk})
    with pytest.raises(RuntimeError, match="out of memory"):
        answer(core, request("r", prompt))
    assert core.runner.num_steps == 2 * last_chunk


def test_a_failure_after_progress_is_another_failure(make_core):
    core = make_core({"r": "hello"}, fails_in={2, 5, 8})
    assert answer(core, request("r", [1]))["r"].text == "hello"


def test_an_aborted_request_is_dropped_at_the_next_step_even_when_nothing_else_runs(make_core):
    core = make_core({"r": "hello"})
    core.add_request(request("r", [1]))
    core.step()
    core.abort_request("r")
    core.abort_request("never heard of")
    assert core.has_work()
    while core.has_work():
        assert core.step() == []
    assert core.runner.dropped == ["r"]
    assert not core.has_work()
    assert core.stats().kv_used_bytes == 0


def test_stats_count_prompts_once_and_every_token(make_core):
    core = make_core({"r": "hello"}, fails_in={4})
    answer(core, request("r", [1] * 20))
    stats = core.stats()
    assert stats.prompt_tokens == 20
    assert stats.generation_tokens == 6
    assert stats.num_running == stats.num_waiting == 0


def test_a_step_is_ahead_unless_the_one_before_only_begins_answers(make_core):
    core = make_core({"r": "abc"})
    answer(core, request("r", [1] * 40, max_tokens=3))
    # Three chunks, the last of which gives the first token.
    log = {
        False: "launch 1, read 1, launch 2, read 2, launch 3, read 3, launch 4, read 4, launch 5, read 5",
        True: "launch 1, launch 2, read 1, launch 3, read 2, read 3, launch 4, launch 5, read 4, read 5",
    }
    assert core.runner.log[:10] == log[core.overlap].split(", ")


def test_first_tokens_are_told_before_anything_else_is_launched(make_core):
    """Also beside a prompt that goes on."""
    core = make_core({"short": "abc", "other": "abc", "long": "abc"})
    for name, num_tokens in (("short", 2), ("other", 3), ("long", 40)):
        core.add_request(request(name, [1] * num_tokens))
    outputs = core.step() or core.step()
    assert sorted((output.request_id, output.text) for output in outputs) == [("other", "a"), ("short", "a")]
    assert core.runner.log == ["launch 1", "read 1"]


def test_a_first_token_beside_a_decode_is_read_after_the_next_launch(make_core):
    core = make_core({"old": "abc" * 10, "new": "xyz"})
    answers = {}
    core.add_request(request("old", [1], max_tokens=30))
    while "old" not in answers:
        collect(core.step(), answers)
    core.add_request(request("new", [1]))
    while "new" not in answers:
        collect(core.step(), answers)
    assert answers["old"].last.finish_reason is None
    launched = core.runner.num_steps
    assert core.runner.log[-2:] == [f"launch {launched}", f"read {launched - core.overlap}"]


def test_progress_until_the_first_token(make_core):
    core = make_core(dict.fromkeys("abcdef", "hello"))
    for name, num_prompt_tokens in zip("abcdef", (30, 1, 2, 3, 60, 50), strict=True):
        core.add_request(request(name, [1] * num_prompt_tokens))
    told: dict[str, list[tuple[int, int]]] = {}
    with_tokens: set[str] = set()
    while core.has_work():
        with_tokens |= {output.request_id for output in core.step() if output.token_ids}
        news = {output.request_id: output for output in core.progress([*"abcdef", "unknown"])}
        assert not news.keys() & with_tokens
        for name, output in news.items():
            assert (output.text, output.finish_reason) == ("", None)
            progress = output.progress
            assert progress.num_computed_tokens <= output.num_prompt_tokens
            assert not (progress.queue_place and progress.num_computed_tokens)
            told.setdefault(name, []).append((progress.queue_place, progress.num_computed_tokens))
    assert with_tokens == set("abcdef")
    # No more than four run at once, and the shorter prompt of those that wait is the nearer.
    assert (told["f"][0], told["e"][0]) == ((1, 0), (2, 0))
    for name in "ae":
        computed = [num_tokens for _, num_tokens in told[name]]
        assert computed == sorted(computed)
        assert computed[-1] > 0


def test_stats_count_tokens_looked_up_among_kept_prefixes_and_found(make_core):
    core = make_core({"first": "a", "again": "a", "without": "a"})
    prompt = [1] * 150
    for name, skip in (("first", False), ("again", False), ("without", True)):
        answer(core, request(name, prompt, max_tokens=1, skip_reading_prefix_cache=skip))
    stats = core.stats()
    assert stats.prefix_query_tokens == 300
    assert stats.prefix_hit_tokens == 128
