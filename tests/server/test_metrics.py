"""GET /metrics and /admin/status of a real server agree with what was asked of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from in_process import ask

import tiny_folder
from doctor_run import DATA
from fake_mac import FakeMac
from server_process import ServerProcess
from vllm_metal.client import Client
from vllm_metal.errors import MetalError
from vllm_metal.monitor import engine_figures
from vllm_metal.monitor.machine import Machine
from vllm_metal.monitor.reading import GpuReading
from vllm_metal.server.machine_watch import MachineWatch

KEY = "sk-secret"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
DEADLINE_S = 60


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of this module's own, so that nobody else is counted; a key keeps it."""
    folder = tiny_folder.save(tmp_path_factory.mktemp("model") / "tiny")
    with ServerProcess(str(folder), "--api-key", KEY, env={}) as process:
        complete(process, max_tokens=1)
        yield process


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "Hi", "temperature": 0, **fields}
    status, reply = server.post("/v1/completions", body, AUTHORIZATION)
    assert status == 200, (reply, server.log)
    return dict(reply)


def scrape(server: ServerProcess) -> dict[str, float]:
    """The sum of each series over its labels."""
    return dict(engine_figures.parse(Client(server.url, KEY).metrics(), 0).values)


def ended(server: ServerProcess, reason: str) -> float:
    text = Client(server.url, KEY).metrics()
    (line,) = [
        line for line in text.splitlines() if f'request_success_total{{finished_reason="{reason}"' in line
    ]
    return float(line.rpartition(" ")[2])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def status(server: ServerProcess) -> dict[str, Any]:
    code, reply = server.get("/admin/status", AUTHORIZATION)
    assert code == 200
    return dict(reply)


@pytest.mark.parametrize("path", ["/metrics", "/admin/status", "/load"])
def test_a_key_is_asked_for(metered: ServerProcess, path: str) -> None:
    code, reply = metered.get(path)
    assert code == 401
    assert reply["error"]["code"] == "invalid_api_key"


def test_the_content_type_is_prometheus_s(metered: ServerProcess) -> None:
    asked = urllib.request.Request(f"{metered.url}/metrics", headers=AUTHORIZATION)
    with urllib.request.urlopen(asked, timeout=DEADLINE_S) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_the_counts_are_those_of_the_requests(metered: ServerProcess) -> None:
    before, length = scrape(metered), ended(metered, "length")
    replies: list[dict[str, Any]] = []
    lengths = (3, 5, 8, 13)
    threads = [
        threading.Thread(
            target=lambda n=n: replies.append(complete(metered, prompt="Hello" * n, max_tokens=n))
        )
        for n in lengths
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = scrape(metered)
    grown = {name: after[name] - before[name] for name in after}
    assert len(replies) == len(lengths)
    usages = [reply["usage"] for reply in replies]
    assert grown["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    reasons = [reply["choices"][0]["finish_reason"] for reply in replies]
    assert ended(metered, "length") - length == reasons.count("length")
    assert grown["vllm:request_success_total"] == len(lengths)
    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
        *("request_generation_tokens", "request_time_per_output_token_seconds"),
    ):
        assert grown[f"vllm:{name}_count"] == len(lengths), name
    assert grown["vllm:request_prompt_tokens_sum"] == grown["vllm:prompt_tokens_total"]
    assert grown["vllm:request_generation_tokens_sum"] == grown["vllm:generation_tokens_total"]
    num_gaps = sum(usage["completion_tokens"] - 1 for usage in usages)
    assert grown["vllm:inter_token_latency_seconds_count"] == num_gaps
    assert max(lengths) <= grown["vllm:iteration_tokens_total_count"] <= sum(lengths) + len(lengths)
    assert 0 < grown["metal:engine_busy_seconds_total"] <= grown["vllm:e2e_request_latency_seconds_sum"]
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["metal:weights_bytes"] > 0
    assert after["metal:model_load_seconds"] > 0
    assert after["metal:memory_peak_bytes"] >= after["metal:memory_active_bytes"] > 0


def test_load_agrees_while_a_request_runs_and_after_its_client_has_left(metered: ServerProcess) -> None:
    aborts = ended(metered, "abort")
    # More than are ever read: the answer ends because its client goes.
    fields = {"max_tokens": 10**6, "ignore_eos": True}
    with closing(Client(metered.url, KEY).chat([{"role": "user", "content": "Hi"}], **fields)) as answer:
        next(answer)
        figures, (_, load) = scrape(metered), metered.get("/load", AUTHORIZATION)
        assert load == {"server_load": 1}
        assert figures["vllm:num_requests_running"] + figures["vllm:num_requests_waiting"] == 1
        told = status(metered)
        assert told["num_running"] + told["num_waiting"] == 1
        assert told["models"][0]["idle_s"] == 0
    until(lambda: ended(metered, "abort") == aborts + 1)
    until(lambda: metered.get("/load", AUTHORIZATION)[1] == {"server_load": 0})
    figures = scrape(metered)
    assert figures["vllm:num_requests_running"] + figures["vllm:num_requests_waiting"] == 0


def test_status(metered: ServerProcess) -> None:
    told = status(metered)
    assert told["pid"] == metered.pid
    assert told["uptime_s"] >= 0
    assert told["restart_needed"] is False
    (model,) = told["models"]
    assert model["name"] == "tiny"
    assert model["status"] == "ok"
    assert model["device"] == "CPU"
    assert model["mode"] in ("fused", "split", "serial")
    assert model["size_bytes"] > 0
    assert model["max_model_len"] > 0
    assert model["load_s"] > 0


def test_without_a_model_there_are_figures_all_the_same() -> None:
    reply = ask("GET", "/metrics")
    assert reply.status == 200
    values = engine_figures.parse(reply.body.decode(), 0).values
    assert values["vllm:request_success_total"] == 0
    assert values["vllm:iteration_tokens_total_count"] == 0
    assert "metal:weights_bytes" not in values
    told = json.loads(ask("GET", "/admin/status").body)
    assert told["models"][0]["status"] in ("loading", "failed")
    assert told["models"][0]["mode"] is None


def test_figures_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = FakeMac(tmp_path / "mac")
    mac.show(ioreg=DATA / "ioreg_m1_max_loaded.txt")
    monkeypatch.setenv("PATH", mac.path)
    values = engine_figures.parse(ask("GET", "/metrics").body.decode(), 0).values
    assert values["metal:gpu_utilization_ratio"] == 0.95
    assert values["metal:memory_pressure_level"] == 1
    # Only `macmon` knows without root.
    assert "metal:gpu_power_watts" not in values


def test_a_tool_that_hangs_does_not_hold_up_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Machine(gpu=GpuReading(source="ioreg", utilization_ratio=0.5))
    released, looks = threading.Event(), []

    def look(*, with_mlx: bool) -> Machine:
        looks.append(with_mlx)
        assert released.wait(DEADLINE_S)
        return told

    monkeypatch.setattr("vllm_metal.monitor.machine.look", look)
    monkeypatch.setattr("vllm_metal.server.machine_watch._PATIENCE_S", 0.01)

    async def scrape() -> None:
        watch = MachineWatch()
        assert [await watch.look(with_mlx=False) for _ in range(3)] == [Machine()] * 3
        assert len(looks) == 1
        released.set()
        deadline = time.monotonic() + DEADLINE_S
        while await watch.look(with_mlx=False) != told:
            assert time.monotonic() < deadline
        # It is fresh enough for a while.
        assert len(looks) == 1

    asyncio.run(scrape())


def test_a_look_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_metal.monitor.machine.look", lambda *, with_mlx: 1 / 0)
    assert asyncio.run(MachineWatch().look(with_mlx=False)) == Machine()


def test_the_client_tells_of_a_key_that_is_missing(metered: ServerProcess) -> None:
    with pytest.raises(MetalError, match="API key"):
        Client(metered.url).metrics()
