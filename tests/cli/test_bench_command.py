from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from scripted_server import Script, chunk, event, refuses, replies, serving, streams
from server_process import METAL, ServerProcess
from vllm_metal.cli.main import app
from vllm_metal.errors import MetalError, ServerUnreachable

SMALL = ("--input-words", "4,8", "--output-len", "3", "--num-prompts", "4")


def bench_serve(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


def measured(*arguments: str | Path) -> Result:
    result = bench_serve(*arguments)
    assert result.exit_code == 0, result.exception or result.stderr
    return result


@pytest.fixture
def scripted():
    with serving() as script:
        script.on_chat(streams("a", "b", prompt_tokens=9))
        yield script


def test_a_real_server(server: ServerProcess, tmp_path: Path):
    saved, plot = tmp_path / "new" / "result.json", tmp_path / "plot.svg"
    result = measured(
        *(
            "--base-url",
            f"{server.url}/v1",
            *SMALL,
            "--max-concurrency",
            "2",
            "--warmup",
            "1",
            "--ignore-eos",
        ),
        *("--percentiles", "50,99", "--save-result", saved, "--plot", plot),
    )
    rows = dict(line.split(":") for line in result.stdout.splitlines() if ":" in line)
    assert rows["Successful requests"].strip() == "4"
    assert rows["Total generated tokens"].strip() == "12"
    assert "Output token throughput (tok/s)" in rows
    assert {f"{name} {metric} (ms)" for name in ("Mean", "Median", "P50", "P99", "Max")
            for metric in ("TTFT", "TPOT", "ITL", "E2EL")} <= rows.keys()  # fmt: skip
    assert "4 of 4 requests" in result.stderr
    kept = json.loads(saved.read_text())
    assert (kept["completed"], kept["failed"], kept["token_counts"]) == (4, 0, "usage")
    assert kept["model"] == "smollm2"
    assert kept["load"]["request_rate"] == "inf"
    assert kept["sampling"] == {"temperature": 0.0, "ignore_eos": True}
    assert kept["median_ttft_ms"] == kept["p50_ttft_ms"] > 0
    assert [request["output_tokens"] for request in kept["requests"]] == [3] * 4
    assert kept["machine"]["cores"] > 0
    assert kept["versions"]["mlx-lm"]
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")


def test_json_in_place_of_the_table(scripted: Script):
    printed = json.loads(
        measured("--base-url", scripted.url, *SMALL, "--json", "--request-rate", "1000").stdout
    )
    assert printed["total_output_tokens"] == 8
    assert printed["total_input_tokens"] == 36
    assert printed["load"]["request_rate"] == 1000


def test_a_server_without_models_is_asked_for_none(scripted: Script):
    scripted.on("/v1/models", replies({"object": "list", "data": []}))
    measured("--base-url", scripted.url, *SMALL)
    assert "model" not in scripted.next_chat().body


def test_the_configured_key_goes_to_the_configured_server_alone(
    scripted: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("METAL_SERVER_API_KEYS", "sesame")
    monkeypatch.setenv("METAL_SERVER_PORT", scripted.url.rpartition(":")[2])
    measured(*SMALL)
    assert scripted.next_chat().headers["Authorization"] == "Bearer sesame"
    with serving() as other:
        other.on_chat(streams("a"))
        measured("--base-url", other.url, *SMALL)
        assert other.next_chat().headers["Authorization"] is None


def test_some_requests_that_fail_are_counted(scripted: Script):
    scripted.on_chat(refuses(429, "the queue is full"), streams("a"))
    printed = json.loads(
        measured("--base-url", scripted.url, *SMALL, "--max-concurrency", 1, "--json").stdout
    )
    assert (printed["completed"], printed["failed"]) == (3, 1)
    assert [request["error"] for request in printed["requests"]] == ["the queue is full", None, None, None]


def test_all_requests_that_fail_are_an_error(scripted: Script):
    scripted.on_chat(refuses(400, "no chat template"))
    result = bench_serve("--base-url", scripted.url, *SMALL)
    assert isinstance(result.exception, MetalError)
    assert result.exception.message == "every request failed: no chat template"
    assert "Failed requests:                         4" in result.stdout


def test_no_server_at_all():
    with serving() as gone:
        pass
    result = bench_serve("--base-url", gone.url)
    assert isinstance(result.exception, ServerUnreachable)
    assert "--base-url" in result.exception.hint


@pytest.mark.parametrize(
    "wrong",
    [
        ("--request-rate", "0"),
        ("--input-words", "64,x"),
        ("--output-len", "0"),
        ("--percentiles", "101"),
        ("--percentiles", ""),
        ("--num-prompts", "0"),
    ],
)
def test_options_that_make_no_sense(wrong: tuple[str, str]):
    result = bench_serve("--base-url", "http://127.0.0.1:9", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.stderr


def test_a_result_that_cannot_be_written(scripted: Script, tmp_path: Path):
    result = bench_serve("--base-url", scripted.url, *SMALL, "--save-result", tmp_path)
    assert isinstance(result.exception, MetalError)
    assert str(tmp_path) in result.exception.message


def test_an_interrupt_prints_what_was_measured(scripted: Script):
    scripted.on_chat(streams("a"), streams("b"), scripted.hangs_after("c"))
    process = subprocess.Popen(
        [METAL, "bench", "serve", "--base-url", scripted.url, *SMALL, "--max-concurrency", "1",
         "--api-key", "k", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for _ in range(3):
            scripted.next_chat()
        process.send_signal(signal.SIGINT)
        printed, talk = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, talk
    result = json.loads(printed)
    assert (result["interrupted"], result["completed"]) == (True, 2)
    assert result["command"].endswith("--api-key '***' --json")
    assert "interrupted: 2 of 4 requests were measured" in talk
    assert scripted.disconnected.wait(20)


def test_the_end_of_an_answer_need_not_be_marked(scripted: Script):
    """mlx_lm.server and others differ in their last chunks; a finish reason is enough."""
    scripted.on_chat(
        lambda handler: (
            handler.begin_events(),
            handler.send_chunk(event(chunk("a"))),
            handler.send_chunk(event(chunk(finish_reason="stop"))),
            handler.wfile.write(b"0\r\n\r\n"),
        )
    )
    result = measured("--base-url", scripted.url, *SMALL)
    assert "The server sent no usage: each chunk counts as one token." in result.stdout
