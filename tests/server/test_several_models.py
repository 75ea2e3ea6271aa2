"""Three models in a real server on a machine that has memory for two."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

import tiny_folder
from server_process import ServerProcess
from vllm_metal.client import Client
from vllm_metal.monitor import engine_figures

NAMES = ("one", "two", "three")
PROMPTS = ("Once upon a time", "x", "a longer prompt, " * 12)
#: Of which a thousandth is for models: two of them, and not the third.
AVAILABLE_BYTES = 3_250_000_000
#: Comes before all else in the server's process, and fakes the machine.
SITE = f"""\
import psutil
real = psutil.virtual_memory
psutil.virtual_memory = lambda: real()._replace(available={AVAILABLE_BYTES})
"""
DEADLINE_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("several")
    models = folder / "models"
    models.mkdir()
    for seed, name in enumerate(NAMES):
        tiny_folder.save(models / name, model_seed=seed)
    large = tiny_folder.save(models / "large")
    mx.save_safetensors(str(large / "model-more.safetensors"), {"more": mx.zeros((1_000_000,))})
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    env = {
        "METAL_MODELS_DIR": str(models),
        "METAL_ENGINE_GPU_MEMORY_UTILIZATION": "0.001",
        "PYTHONPATH": str(folder / "site"),
    }
    with ServerProcess(str(models / NAMES[0]), env=env) as process:
        yield process.ready()


def complete(server: ServerProcess, model: str, prompt: str, **fields: Any) -> str:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    status, reply = server.post("/v1/completions", body | fields)
    assert status == 200, (reply, server.log)
    assert reply["model"] == model
    return str(reply["choices"][0]["text"])


def states(server: ServerProcess) -> dict[str, str]:
    status, reply = server.get("/admin/status")
    assert status == 200
    return {model["name"]: model["status"] for model in reply["models"]}


def until(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def loads(server: ServerProcess) -> Counter[str]:
    return Counter(re.findall(r"loaded `(\w+)` in", server.log))


def active_bytes(server: ServerProcess) -> float:
    """With the first model alone."""
    for name in NAMES[1:]:
        assert server.post("/admin/models/unload", {"model": name})[0] == 200
    complete(server, NAMES[0], "x")
    return engine_figures.parse(Client(server.url).metrics(), 0).values["metal:memory_active_bytes"]


def test_mixed_traffic(server: ServerProcess) -> None:
    """Every answer is the one that the model gives alone, and memory is back when models have left."""
    expected = {(name, prompt): complete(server, name, prompt) for name in NAMES for prompt in PROMPTS}
    assert len({expected[name, PROMPTS[0]] for name in NAMES}) == len(NAMES)
    before, already = active_bytes(server), loads(server)

    work = [list(expected)[i % len(expected)] for i in range(200)]
    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(lambda each: complete(server, *each), work))
    assert answers == [expected[each] for each in work]

    more = loads(server) - already
    assert sum(more.values()) >= 2, "there was room for all"
    # Each load has served several requests.
    assert sum(more.values()) <= len(work) / 3
    assert sum(state == "ok" for state in states(server).values()) <= 2
    assert active_bytes(server) <= before + 100_000


def test_one_that_does_not_fit_is_refused_with_what_would_help(server: ServerProcess) -> None:
    status, reply = server.post("/v1/completions", {"model": "large", "prompt": "x"})
    assert status == 507
    assert reply["error"]["code"] == "insufficient_memory"
    message = reply["error"]["message"]
    assert "`large` needs 4.1" in message
    assert "`engine.gpu_memory_utilization` = 0.001 allows 3.25 MB of 3.25 GB" in message
    assert "set `engine.gpu_memory_utilization` to 0.01 or more" in message
    # It does others no harm.
    complete(server, NAMES[1], "x")


def test_keep_alive(server: ServerProcess) -> None:
    for keep_alive, state in ((0, "unloaded"), ("0s", "unloaded"), (-1, "ok"), ("10m", "ok")):
        complete(server, "two", "x", keep_alive=keep_alive)
        until(lambda state=state: states(server).get("two", "unloaded") == state)
    status, reply = server.post("/v1/completions", {"prompt": "x", "keep_alive": "soon"})
    assert (status, reply["error"]["param"]) == (400, "keep_alive")
    body = {"model": "two", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "keep_alive": 0}
    assert server.post("/v1/chat/completions", body)[0] == 200
    until(lambda: "two" not in states(server))


def test_loading_and_unloading_by_hand(server: ServerProcess) -> None:
    status, told = server.post("/admin/models/load", {"model": "three", "keep_alive": "5m"})
    assert (status, told["name"], told["status"], told["is_default"]) == (200, "three", "ok", False)
    assert 0 < told["unloads_in_s"] <= 300
    listed = {model["id"]: model for model in server.get("/v1/models")[1]["data"]}
    assert next(iter(listed)) == NAMES[0]
    assert listed["three"]["state"] == "ok"
    assert listed["large"]["state"] in ("unloaded", "failed")
    assert listed["three"]["max_model_len"] == listed["large"]["max_model_len"] == 4096
    status, told = server.post("/admin/models/unload", {"model": "three"})
    assert (status, told["status"], told["size_bytes"]) == (200, "unloaded", None)
    for nothing in ({}, {"model": ""}, {"model": None}):
        status, reply = server.post("/admin/models/unload", nothing)
        assert (status, reply["error"]["param"]) == (400, "model")
    # A request has it loaded again.
    assert server.post("/admin/models/unload", {"model": NAMES[0]})[0] == 200
    assert states(server)[NAMES[0]] == "unloaded"
    listed = {model["id"]: model for model in server.get("/v1/models")[1]["data"]}
    assert (listed[NAMES[0]]["state"], listed[NAMES[0]]["max_model_len"]) == ("unloaded", 4096)
    assert server.get("/ready")[0] == 200
    complete(server, NAMES[0], "x")
    status, reply = server.post("/admin/models/load", {"model": "tow"})
    assert status == 404
    assert "did you mean `two`" in reply["error"]["message"]


def test_each_model_has_its_own_series(server: ServerProcess) -> None:
    for name in NAMES[:2]:
        complete(server, name, "x")
    metrics = Client(server.url).metrics()
    for name in NAMES[:2]:
        assert re.search(rf'vllm:generation_tokens_total{{model_name="{name}"}} [1-9]', metrics)
