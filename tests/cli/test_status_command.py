"""`metal status` and `metal ps` against a scripted server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from scripted_server import Script, refuses, replies, serving
from vllm_metal.cli.main import app
from vllm_metal.cli.status import duration

LOADED = {
    "name": "org/model",
    "status": "ok",
    "stage": "ready",
    "detail": None,
    "size_bytes": 538_060_032,
    "number_format": "4-bit",
    "device": "GPU",
    "mode": "fused",
    "max_model_len": 8192,
    "load_s": 2.5,
    "idle_s": 725.0,
    "pinned": False,
    "unloads_in_s": 1075.0,
}
LOADING = dict.fromkeys(LOADED) | {"name": "org/model", "status": "loading", "stage": "loading `org/model`"}
SERVER = {
    "version": "0.1.0",
    "pid": 4711,
    "uptime_s": 7500.0,
    "restart_needed": False,
    "models": [LOADED],
    "num_running": 2,
    "num_waiting": 1,
}

Metal = Callable[..., Result]


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        script.on("/admin/status", replies(SERVER))
        yield script


@pytest.fixture
def metal(tmp_path: Path, server: Script) -> Metal:
    def run(*arguments: str) -> Result:
        env = dict.fromkeys(["HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"], str(tmp_path)) | {"PATH": ""}
        return CliRunner().invoke(app, [*arguments, "--url", server.url], env=env)

    return run


def test_one_screen(metal: Metal, server: Script) -> None:
    done = metal("status")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        f"server    vllm-metal 0.1.0 at {server.url}, pid 4711, up 2 h 5 min",
        "requests  2 running, 1 waiting",
        "",
        "MODEL      STATE  SIZE      FORMAT  DEVICE  MODE   CONTEXT  IDLE        UNLOADS",
        "org/model  ready  538.1 MB  4-bit   GPU     fused  8192     12 min 5 s  in 17 min 55 s",
    ]


def test_ps_is_the_models_alone(metal: Metal) -> None:
    done = metal("ps")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == metal("status").stdout.splitlines()[-2:]
    assert json.loads(metal("ps", "--json").stdout) == [LOADED]


def test_json(metal: Metal, server: Script) -> None:
    assert json.loads(metal("status", "--json").stdout) == {
        "url": server.url,
        "server": SERVER,
        "problem": None,
        "service": None,
    }


def test_a_model_that_works_is_not_idle(metal: Metal, server: Script) -> None:
    server.on("/admin/status", replies(SERVER | {"models": [LOADED | {"idle_s": 0.0}]}))
    assert metal("ps").stdout.splitlines()[1].endswith("8192     no    in 17 min 55 s")


def test_a_model_that_loads_serves_nothing(metal: Metal, server: Script) -> None:
    server.on("/admin/status", replies(SERVER | {"models": [LOADING]}))
    done = metal("status")
    assert done.exit_code == 3
    assert "org/model  loading `org/model`  –" in done.stdout


def test_several_models(metal: Metal, server: Script) -> None:
    models = [
        LOADED | {"unloads_in_s": None},
        LOADED | {"name": "b", "pinned": True},
        LOADING | {"name": "c", "stage": "fetching `c` (12 %)"},
        LOADING | {"name": "d", "status": "failed", "stage": "no model", "detail": "there is no model `d`"},
        LOADING | {"name": "e", "status": "unloaded", "stage": "not loaded"},
    ]
    server.on("/admin/status", replies(SERVER | {"models": models}))
    *lines, reason = metal("ps").stdout.splitlines()
    assert reason == "d: there is no model `d`"
    rows = [re.split(r"  +", line) for line in lines]
    assert [(row[1], row[-1]) for row in rows] == [
        ("STATE", "UNLOADS"),
        ("ready", "never"),
        ("ready", "pinned"),
        ("fetching `c` (12 %)", "–"),
        ("no model", "–"),
        ("not loaded", "–"),
    ]


def test_a_model_that_is_loaded_on_demand_would_be_served(metal: Metal, server: Script) -> None:
    unloaded = LOADING | {"status": "unloaded", "stage": "not loaded"}
    server.on("/admin/status", replies(SERVER | {"models": [unloaded]}))
    assert metal("status").exit_code == 0


def test_an_upgrade_that_awaits_a_restart_is_told(metal: Metal, server: Script) -> None:
    server.on("/admin/status", replies(SERVER | {"restart_needed": True}))
    assert "\nrestart   needed" in metal("status").stdout


def test_a_key_that_is_missing_is_told(metal: Metal, server: Script) -> None:
    server.on("/admin/status", refuses(401, "a valid API key is needed"))
    done = metal("status")
    assert done.exit_code == 3
    assert done.stdout == f"server    no status from {server.url}\n"
    assert "error: a valid API key is needed" in done.stderr


def test_what_another_server_says_is_no_status(metal: Metal, server: Script) -> None:
    server.on("/admin/status", replies({"status": "ok"}))
    done = metal("status")
    assert done.exit_code == 3
    assert f"error: what answers at {server.url} is not vllm-metal" in done.stderr


def test_no_server(tmp_path: Path) -> None:
    url = f"unix:{tmp_path / 'nobody'}"
    done = CliRunner().invoke(app, ["status", "--json", "--url", url], env={"PATH": ""})
    assert done.exit_code == 3
    told = json.loads(done.stdout)
    assert told["server"] is None
    assert told["problem"] == f"no server answers at {url}"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3725, "1 h 2 min"),
        (90000, "1 d 1 h"),
        (86460, "1 d 1 min"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
