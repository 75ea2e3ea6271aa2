"""`metal load` and `metal stop` against a scripted server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from scripted_server import DEADLINE_S, Handler, Meanwhile, Script, refuses, replies, serving
from vllm_metal.cli.main import app
from vllm_metal.errors import InsufficientMemory, ModelNotFound

LOADED = {"name": "org/model", "status": "ok", "stage": "ready", "pinned": False, "unloads_in_s": 1799.9}

Metal = Callable[..., Result]


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        script.on("/admin/status", replies({"uptime_s": 1, "models": [LOADED]}))
        script.on("/admin/models/load", replies(LOADED))
        script.on("/admin/models/unload", replies(LOADED | {"status": "unloaded"}))
        yield script


@pytest.fixture
def metal(tmp_path: Path, server: Script) -> Metal:
    def run(*arguments: str) -> Result:
        env = dict.fromkeys(["HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"], str(tmp_path))
        return CliRunner().invoke(app, [*arguments, "--url", server.url], env=env)

    return run


def posted(server: Script) -> list[Any]:
    """The paths and bodies of what was posted."""
    received = [server.received.get_nowait() for _ in range(server.received.qsize())]
    return [(each.path, each.body) for each in received if each.method == "POST"]


def test_load(metal: Metal, server: Script) -> None:
    done = metal("load", "org/model")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "`org/model` is loaded and stays until it has been idle for 30 min\n"
    assert posted(server) == [("/admin/models/load", {"model": "org/model", "keep_alive": None})]


@pytest.mark.parametrize(("given", "sent"), [("10m", "10m"), ("90", 90.0), ("-1", -1.0), ("soon", "soon")])
def test_keep_alive(metal: Metal, server: Script, given: str, sent: object) -> None:
    assert metal("load", "org/model", "--keep-alive", given).exit_code == 0
    assert posted(server)[0][1]["keep_alive"] == sent


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"pinned": True}, "loaded and pinned"),
        ({"unloads_in_s": None}, "loaded and stays"),
        ({"unloads_in_s": 0.0}, "loaded and goes as soon as it is idle"),
    ],
)
def test_a_model_may_stay(metal: Metal, server: Script, status: dict[str, Any], words: str) -> None:
    server.on("/admin/models/load", replies(LOADED | status))
    assert metal("load", "org/model").stderr == f"`org/model` is {words}\n"


def test_load_tells_how_far_it_is(metal: Metal, server: Script) -> None:
    other = LOADED | {"name": "org/other", "status": "loading", "stage": "loading `org/other`"}

    def stage(text: str) -> list[dict[str, Any]]:
        return [other, {"name": "org/model", "status": "loading", "stage": text}]

    meanwhile = Meanwhile(
        server,
        [other, {"name": "org/model", "status": "unloaded", "stage": "not loaded"}],
        stage("fetching `org/model` (1 %)"),
        stage("fetching `org/model` (2 %)"),
        stage("loading `org/model`"),
    )
    server.on("/admin/models/load", meanwhile.then(replies(LOADED)))
    assert metal("load", "org/model").stderr.splitlines()[:-1] == [
        "fetching `org/model`",
        "loading `org/model`",
    ]


def test_a_server_that_does_not_tell_is_waited_for_in_silence(metal: Metal, server: Script) -> None:
    told = threading.Event()

    def refused(handler: Handler) -> None:
        refuses(403, "not for you")(handler)
        told.set()

    def later(handler: Handler) -> None:
        assert told.wait(DEADLINE_S)
        replies(LOADED)(handler)

    server.on("/admin/status", refused)
    server.on("/admin/models/load", later)
    done = metal("load", "org/model")
    assert (done.exit_code, len(done.stderr.splitlines())) == (0, 1)


def test_a_load_that_fails(metal: Metal, server: Script) -> None:
    server.on("/admin/models/load", refuses(507, "`org/model` needs 9 GB, and 2 GB are free"))
    done = metal("load", "org/model")
    assert isinstance(done.exception, InsufficientMemory)
    assert done.exception.message == "`org/model` needs 9 GB, and 2 GB are free"
    server.on("/admin/models/load", refuses(404, "no such model", code="model_not_found"))
    assert isinstance(metal("load", "org/model").exception, ModelNotFound)


def test_stop(metal: Metal, server: Script) -> None:
    done = metal("stop", "org/model")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "`org/model` is unloaded\n")
    assert posted(server) == [("/admin/models/unload", {"model": "org/model"})]


def test_stop_tells_what_it_waits_for(metal: Metal, server: Script) -> None:
    meanwhile = Meanwhile(
        server, [LOADED | {"num_running": 2, "num_waiting": 1}], [LOADED | {"num_running": 1}]
    )
    server.on("/admin/models/unload", meanwhile.then(replies(LOADED)))
    assert metal("stop", "org/model").stderr.splitlines() == [
        "waiting for 3 requests of `org/model` to end",
        "waiting for 1 request of `org/model` to end",
        "`org/model` is unloaded",
    ]


def test_stop_all(metal: Metal, server: Script) -> None:
    statuses = {"a": "ok", "b": "unloaded", "c": "loading", "d": "failed"}
    models = [{"name": name, "status": status} for name, status in statuses.items()]
    server.on("/admin/status", replies({"uptime_s": 1, "models": models}))
    assert metal("stop", "--all").exit_code == 0
    assert [body["model"] for _, body in posted(server)] == ["a", "c"]
    server.on("/admin/status", replies({"uptime_s": 1, "models": models[1:2]}))
    assert metal("stop", "--all").stderr == "no model is loaded\n"


@pytest.mark.parametrize("arguments", [(), ("org/model", "--all")])
def test_stop_wants_names_or_all(metal: Metal, arguments: tuple[str, ...]) -> None:
    done = metal("stop", *arguments)
    assert done.exit_code == 2
    assert "give `--all`" in done.stderr


@pytest.mark.parametrize("arguments", [("load", ""), ("stop", ""), ("stop", "org/model", " ")])
def test_an_empty_name_is_of_no_model(metal: Metal, server: Script, arguments: tuple[str, ...]) -> None:
    done = metal(*arguments)
    assert done.exit_code == 2
    assert "name is empty" in done.stderr
    assert not posted(server)
