"""`metal serve` where it cannot serve, and under launchd."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

import tiny_folder
from fake_hub import FakeHub, Repository
from server_process import METAL, ServerProcess
from terminal import on_terminal
from vllm_metal.cli.serve import SETTING_OF, serve
from vllm_metal.service import launchd


def _serve(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [METAL, "serve", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def closed_port():
    """A port where nothing listens while the test runs."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_a_port_in_use_names_who_has_it(server):
    port = server.url.rsplit(":", 1)[1]
    done = _serve("smollm2", "--port", port)
    assert done.returncode == 1
    assert f"error: port {port} is used by `metal` (pid {server.pid})" in done.stderr
    assert f"hint: choose another with `--port {int(port) + 1}`" in done.stderr


def test_no_hub_names_a_model_that_needs_none(closed_port):
    done = _serve("--port", "0", HF_ENDPOINT=f"http://127.0.0.1:{closed_port}")
    assert done.returncode == 1
    assert "the model hub can't be reached" in done.stderr
    assert "metal serve smollm2" in done.stderr


def test_a_folder_that_is_no_model(tmp_path):
    done = _serve(str(tmp_path), "--port", "0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-3].startswith("error: ")
    assert done.stderr.splitlines()[-1].startswith("hint: ")


def test_a_bad_config_is_the_users_error(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("[server]\nprot = 1\n")
    done = _serve("--config", str(config))
    assert done.returncode == 1
    assert f"{config}" in done.stderr
    assert "did you mean `server.port`?" in done.stderr


def test_under_launchd_a_bad_config_leaves_its_reason_and_is_not_tried_again(tmp_path, own_home):
    config = tmp_path / "config.toml"
    config.write_text("[server]\nport = true\n")
    done = _serve("--config", str(config), XPC_SERVICE_NAME=launchd.LABEL)
    assert done.returncode == 0
    reason = json.loads(launchd.reason_file().read_text())
    assert "server.port" in reason["message"]
    assert abs(reason["time"] - time.time()) < 60


def test_under_launchd_a_missing_hub_leaves_the_server_up_with_the_reason(closed_port):
    env = {"XPC_SERVICE_NAME": launchd.LABEL, "HF_ENDPOINT": f"http://127.0.0.1:{closed_port}"}
    with ServerProcess(env=env) as process:
        status, body = process.post("/v1/completions", {"prompt": "Hi"})
        assert status == 503
        assert "hub can't be reached" in body["error"]["message"]
        status, ready = process.get("/ready")
        assert (status, ready["status"]) == (503, "failed")
        assert "hub can't be reached" in ready["detail"]
        assert process.get("/health")[0] == 200
        assert process.stop() == 0


def test_every_option_sets_a_setting():
    assert inspect.signature(serve).parameters.keys() - SETTING_OF.keys() == {
        "config",
        "_enable_auto_tool_choice",
        "_enable_lora",
    }


def test_a_terminal_shows_the_download_and_then_only_that_it_serves(tmp_path):
    folder = tiny_folder.save(tmp_path / "tiny")
    hub = FakeHub()
    hub.repositories["org/tiny"] = Repository({file.name: file.read_bytes() for file in folder.iterdir()})
    with hub.serving() as endpoint:
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "TERM": "xterm"}
        with on_terminal("serve", "org/tiny", "--port", "0", env=env) as terminal:
            terminal.expect("downloading `org/tiny`\r\n")
            shown = terminal.expect("serving `org/tiny` on http://127.0.0.1:")
            assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
            assert terminal.expect("\r\n").endswith("/v1")
            assert terminal.is_silent_for(0.5)
            terminal.type("\x03")
            assert terminal.exit_code() == 0


@pytest.fixture
def endless_load(tmp_path: Path) -> list[str]:
    """Arguments of a load that never ends: its template comes from a pipe that nobody writes to."""
    template = tmp_path / "template.jinja"
    os.mkfifo(template)
    return [str(tiny_folder.save(tmp_path / "tiny")), "--chat-template", str(template)]


def wait_for(process: ServerProcess, field: str, value: str) -> None:
    deadline = time.monotonic() + 30
    while process.get("/ready")[1].get(field) != value:
        assert time.monotonic() < deadline


def test_stopping_does_not_wait_for_a_load(endless_load):
    with ServerProcess(*endless_load, env={"METAL_SERVER_DRAIN_TIMEOUT": "0"}) as process:
        wait_for(process, "stage", "loading `tiny`")
        assert process.stop() == 0


def test_a_second_interrupt_does_not_wait_for_a_load(endless_load):
    with ServerProcess(*endless_load, env={}) as process:
        wait_for(process, "stage", "loading `tiny`")
        process.process.send_signal(signal.SIGINT)
        wait_for(process, "status", "draining")
        assert process.stop(signal.SIGINT) == 130
