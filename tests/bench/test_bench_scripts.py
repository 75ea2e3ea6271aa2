"""The repository's comparison scripts, on models small enough for any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from comparison import medians, ratios, table
from servers import OURS, THEIRS, Server, ServerFailed

import tiny_embedders
import tiny_folder
from server_process import ServerProcess

SCRIPTS = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from export_smollm2 import export_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    export_tokenizer(smollm2_path, folder)
    return folder


def script(name: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """As on a machine where the package is not installed, only found."""
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent / "src")}
    return subprocess.run(
        [sys.executable, SCRIPTS / name, *map(str, arguments)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_medians_and_ratios():
    ours = medians([{"a": 1, "b": 4.0, "c": "x"}, {"a": 3, "b": 5.0}, {"a": 8, "b": None, "d": True}])
    assert ours == {"a": 3}
    assert ratios({"a": 3, "b": 1}, {"a": 2, "b": 0}) == {"a": 1.5}


def test_the_table_has_a_row_for_what_either_side_measured():
    lines = table({"a": 3.0, "b": 1.0}, {"a": 2.0, "c": 4.0}, ["a", "b", "c", "d"]).splitlines()
    assert [line.split() for line in lines] == [
        [OURS, THEIRS, "ratio"],
        ["a", "3.0", "2.0", "1.500"],
        ["b", "1.0", "-", "-"],
        ["c", "-", "4.0", "-"],
    ]


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path):
    log = tmp_path / "log"
    with pytest.raises(ServerFailed, match="vllm-metal"), Server(OURS, tmp_path / "none", log):
        pass
    assert "$ " in log.read_text()
    assert not psutil.Process().children()


@pytest.mark.slow
def test_gpu_script_on_a_tiny_model(tokenizer: Path, tmp_path: Path):
    done = script(
        "gpu.py",
        *("--out", "out", "--preset", "tiny", "--tokenizer", tokenizer, "--model", tmp_path / "model"),
        *("--cases", "c16,prefix16,again,long", "--requests", "0.1", "--words", "0.05", "--limit", "120"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/gpu-tiny.json").read_text())
    for case in ("c16", "prefix16"):
        for server in (OURS, THEIRS):
            run = result["cases"][case][server]
            assert (run["failed"], run["timed_out"], run["tokens_per_chunk"]) == (0, False, 1.0), server
            assert all(each["output_tokens"] == each["max_tokens"] for each in run["requests"])
            assert run["server_cpu_s"] > 0
        assert result["ratios"][case]["output_throughput"] > 0
        assert case in done.stdout
    for server in (OURS, THEIRS):
        assert result["cases"]["again"][server]["again_ttft_ms"] > 0
        long = result["cases"]["long"][server]
        assert long["prompt_tokens"] > 800
        assert min(long["rate_during"], long["rate_before"]) > 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        f"gpu-tiny-{THEIRS}.log",
        f"gpu-tiny-{OURS}.log",
        "gpu-tiny.json",
    ]


@pytest.mark.slow
def test_a_case_past_its_limit_does_not_stop_the_others(tokenizer: Path, tmp_path: Path):
    done = script(
        "gpu.py",
        *("--out", "out", "--preset", "tiny", "--tokenizer", tokenizer, "--model", tmp_path / "model"),
        *("--cases", "c16,again", "--servers", OURS, "--words", "0.05", "--limit", "0.001"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "out/gpu-tiny.json").read_text())["cases"]
    assert cases["c16"][OURS]["timed_out"]
    assert cases["again"][OURS] == {"error": "not done within 0.001 s"}


def test_churn_script_on_a_tiny_model(tokenizer: Path, tmp_path: Path):
    from random_model import make

    make("tiny", tokenizer, tmp_path / "model")
    done = script(
        "churn.py",
        *("model", "--batch", "3", "--input-len", "20", "--leaves", "4", "--joins", "2"),
        *("--save-result", "churn.json"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "churn.json").read_text())["steps"]
    assert {"decode", "join"} <= set(steps) <= {"decode", "join", "leave", "growth"}
    assert all(each["worst_ms"] >= each["median_ms"] > 0 for each in steps.values())
    assert all(line.split()[0] in steps for line in done.stdout.splitlines())


@pytest.mark.slow
def test_embeddings_beside_chats_on_tiny_models(tmp_path: Path):
    tiny_folder.save(tmp_path / "chat")
    tiny_embedders.save_encoder(tmp_path / "encoder")
    done = script(
        "embeddings.py",
        *("--model", "chat", "--embedder", "encoder", "--chats", "2", "--embeddings", "4", "--words", "8"),
        *("--output-len", "64", "--pairs", "1", "--save-result", "embeddings.json"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "embeddings.json").read_text())
    assert result["medians"]["beside"]["embeddings_per_s"] > 0
    assert result["itl_p99_ratio"] > 0
    assert "itl_p99_ms" in done.stdout


@pytest.mark.slow
def test_turns_of_an_agent_on_a_tiny_model(tokenizer: Path, tmp_path: Path):
    from random_model import make

    make("tiny", tokenizer, tmp_path / "model")
    done = script(
        "agent_turns.py",
        *("--model", "model", "--words", "400", "--conversations", "1", "--save-result", "turns.json"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "turns.json").read_text())
    (first, second), (none, kept) = result["prompt_tokens"], result["cached_tokens"]
    assert none == 0 < 400 < kept < first < second
    assert result["ratio"] > 0
    assert "second_ttft_ms" in done.stdout


@pytest.mark.slow
def test_exported_smollm2_gives_the_same_text_in_mlx_lm(
    smollm2_path: Path, tmp_path: Path, server: ServerProcess
):
    exported = script("export_smollm2.py", smollm2_path, tmp_path / "smollm2", folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(tmp_path / "smollm2"))
    question = "Name the capital of France."
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    theirs = mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)
    assert "Paris" in theirs
    assert server.chat(question, max_tokens=24) == theirs


@pytest.mark.slow
def test_compare_script_on_a_tiny_model(tokenizer: Path, tmp_path: Path):
    from random_model import make

    make("tiny", tokenizer, tmp_path / "model")
    done = script(
        "compare.py",
        *("--model", "model", "--pairs", "2", "--concurrency", "2", "--num-prompts", "3", "--warmup", "1"),
        *("--input-words", "8", "--output-len", "4", "--temperature", "0.7", "--top-p", "0.9"),
        *("--out", "results", "--name", "sampled"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "output_throughput" in done.stdout
    result = json.loads((tmp_path / "results/sampled.json").read_text())
    assert [len(result["runs"][server]) for server in (OURS, THEIRS)] == [2, 2]
    assert result["runs"][OURS][0]["sampling"] == {"temperature": 0.7, "top_p": 0.9}
    assert {run["completed"] for server in (OURS, THEIRS) for run in result["runs"][server]} == {3}
    assert result["ratios"]["output_throughput"] == pytest.approx(
        result["medians"][OURS]["output_throughput"] / result["medians"][THEIRS]["output_throughput"]
    )
    assert (tmp_path / f"results/sampled-{OURS}.log").exists()


def test_the_overhead_of_the_server_is_measured(smollm2_path: Path, tmp_path: Path):
    small = ("--num-prompts", 40, "--output-len", 12, "--input-words", 5, "--step-ms", 5)
    result = tmp_path / "result.json"
    done = script("http_overhead.py", smollm2_path, *small, "--save-result", result, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(result.read_text())["figures"]
    assert 0 < figures["step_median_ms"] <= figures["step_p99_ms"]
    assert figures["tokens_per_chunk"] >= 1
    assert "step_median_ms" in done.stdout
