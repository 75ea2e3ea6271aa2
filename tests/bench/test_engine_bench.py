"""`metal bench engine` on a tiny model: what it prints and keeps. How fast it is, is nobody's claim here."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import engine_driver
import tiny_folder
import tiny_models
from vllm_metal.bench.engine import Figures, Run, Work, engine_contender, loop_contender, measure
from vllm_metal.cli.main import app
from vllm_metal.engine.mlx.bare_loops import bare_loops
from vllm_metal.engine.mlx.static_shapes import StaticShapes
from vllm_metal.engine.sampling_params import SamplingParams

SMALL = ("--batch", "1,3", "--input-len", "6", "--output-len", "8", "--rounds", "2")
FIGURES = {"median_step_ms", "p99_step_ms", "output_throughput", "prefill_throughput", "busy_share", "cpu_s"}
LOOPS = {"slot_loop", "mlx_lm_loop"}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("models") / "tiny")


def bench_engine(*arguments: str | Path) -> Result:
    """On a thread of its own, since the engine's end takes the streams of its thread along."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(CliRunner().invoke, app, ["bench", "engine", *map(str, arguments)]).result()


def measured(*arguments: str | Path) -> Result:
    result = bench_engine(*arguments)
    assert result.exit_code == 0, result.exception or result.stderr
    return result


def test_the_table_and_what_is_kept(folder: Path, tmp_path: Path):
    saved = tmp_path / "new" / "result.json"
    result = measured(folder, *SMALL, "--limit", "--sampled", "--save-result", saved)
    header, *lines = result.stdout.splitlines()
    assert header.split("  ")[0] == "batch"
    for column in ("run", "step ms", "p99 ms", "out tok/s", "prefill tok/s", "busy", "CPU s"):
        assert column in header
    runs = ["engine", "slot_loop", "mlx_lm_loop", "sampled"]
    ratios = ["engine / slot_loop", "engine / mlx_lm_loop", "sampled / engine"]
    assert len(lines) == 2 * (len(runs) + len(ratios))
    for batch, block in (("1", lines[:7]), ("3", lines[7:])):
        assert [line.split()[:2] for line in block[:4]] == [[batch, run] for run in runs]
        assert [line.strip().startswith(ratio) for line, ratio in zip(block[4:], ratios, strict=True)]
    assert "batch 3, round 2 of 2: engine" in result.stderr

    kept = json.loads(saved.read_text())
    assert kept["model"] == str(folder)
    assert kept["machine"]["cores"] > 0
    assert kept["versions"]["mlx-lm"]
    assert kept["settings"]["temperature"] == 0.0
    assert [each["batch"] for each in kept["results"]] == [1, 3]
    for each in kept["results"]:
        assert each["medians"].keys() == set(runs)
        assert each["ratios"].keys() == set(ratios)
        assert len(each["rounds"]) == 2
        for figures in (*each["medians"].values(), *each["ratios"].values()):
            assert figures.keys() == FIGURES
        engine = each["medians"]["engine"]
        assert all(value > 0 for value in engine.values())
        assert engine["busy_share"] < 1
        assert each["ratios"]["engine / slot_loop"]["output_throughput"] > 0


def test_json_in_place_of_the_table(folder: Path):
    printed = json.loads(measured(folder, *SMALL, "--temperature", "0.7", "--top-p", "0.9", "--json").stdout)
    assert (printed["settings"]["temperature"], printed["settings"]["top_p"]) == (0.7, 0.9)
    for each in printed["results"]:
        assert each["medians"].keys() == {"engine"}
        assert each["ratios"] == {}


@pytest.mark.parametrize(
    "wrong", [("--batch", "1,x"), ("--batch", "0"), ("--input-len", "0"), ("--input-len", "4096")]
)
def test_options_that_make_no_sense(folder: Path, wrong: tuple[str, str]):
    result = bench_engine(folder, *SMALL, *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.stderr


@pytest.mark.parametrize("static", StaticShapes)
def test_bare_loops_give_the_tokens_that_the_engine_gives(static: StaticShapes):
    model = tiny_models.make("llama")
    core = engine_driver.make_core(model, mode="fused", static=static)
    prompts = Work(3, 300, 10).prompts(random.Random(0), tiny_models.VOCAB_SIZE)
    requests = [
        engine_driver.request(f"r{row}", prompt, max_tokens=10, ignore_eos=True)
        for row, prompt in enumerate(prompts)
    ]
    answers = engine_driver.run(core, requests)
    expected = [answers[request.request_id].token_ids for request in requests]
    loops = bare_loops(core.runner)
    assert loops.keys() == LOOPS
    for name, loop in loops.items():
        for _ in range(2):
            loop.prefill(prompts, 10)
            steps = list(loop.decode(10))
            loop.drop()
            assert [list(answer) for answer in zip(*steps, strict=True)] == expected, name


def test_a_model_that_runs_split_is_compared_with_mlx_lms_loop_alone():
    core = engine_driver.make_core(tiny_models.make("llama"))
    assert bare_loops(core.runner).keys() == {"mlx_lm_loop"}


@pytest.mark.parametrize("overlap", [False, True])
def test_every_token_and_step_is_counted(overlap: bool):
    core = engine_driver.make_core(tiny_models.make("llama"), mode="fused", overlap=overlap)
    work = Work(4, 5, 9)
    prompts = work.prompts(random.Random(0), tiny_models.VOCAB_SIZE)
    run = engine_contender(core, GREEDY)(work, prompts)
    assert (run.num_prompt_tokens, run.num_output_tokens, len(run.steps_s)) == (20, 36, 8)
    assert not core.has_work()
    [loop] = bare_loops(engine_driver.make_core(tiny_models.make("llama")).runner).values()
    run = loop_contender(loop)(work, prompts)
    assert (run.num_prompt_tokens, run.num_output_tokens, len(run.steps_s)) == (16, 36, 9)


def test_figures_of_a_run():
    figures = Run(
        num_prompt_tokens=100,
        num_output_tokens=40,
        steps_s=[9.0, 9.0, 9.0, 0.3, 0.1, 0.2],
        prefill_s=2.0,
        duration_s=4.0,
        cpu_s=5.0,
        busy_s=3.0,
    ).figures()
    assert figures == Figures(pytest.approx(200), pytest.approx(298), 10.0, 50.0, 0.75, 5.0)
    assert Run(duration_s=1.0, num_output_tokens=1, steps_s=[1.0]).figures().median_step_ms is None


def test_ratios_above_one_are_better():
    good = Figures(10.0, 20.0, 200.0, 100.0, 0.9, 2.0)
    bad = Figures(20.0, 80.0, 100.0, 50.0, None, 8.0)
    assert good.against(bad) == Figures(2.0, 4.0, 2.0, 2.0, None, 4.0)


def test_contenders_take_turns_in_going_first_and_ratios_are_of_one_round():
    seen = []

    def contender(name: str, durations: list[float]):
        def run(work: Work, prompts: list[list[int]]) -> Run:
            seen.append((name, prompts))
            return Run(num_output_tokens=1, duration_s=durations.pop(0), cpu_s=1.0)

        return run

    contenders = {"a": contender("a", [1.0, 2.0, 8.0]), "b": contender("b", [2.0, 4.0, 1.0])}
    result = measure(
        Work(1, 4, 1), contenders, [("a", "b")], vocab_size=100, rounds=3, on_run=lambda *_: None
    )
    assert [name for name, _ in seen] == ["a", "b", "b", "a", "a", "b"]
    assert len({str(prompts) for _, prompts in seen}) == 6
    assert result.ratios["a", "b"].output_throughput == 2.0
    assert result.medians["a"].output_throughput == 0.5


def test_the_scheduler_is_timed_in_every_case():
    from scheduler import CASES
    from scheduler import measure as measure_scheduler

    measured = measure_scheduler(num_steps=3)
    assert measured.keys() == CASES.keys()
    assert all(0 < figures["median_us"] <= figures["p99_us"] for figures in measured.values())
