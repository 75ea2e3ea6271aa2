"""`metal top` on a fake Mac: one look, recordings, and a pseudo-terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fake_mac import FakeMac
from scripted_server import Script, replies, serving
from server_process import METAL
from terminal import on_terminal, plain
from vllm_metal.cli.main import app
from vllm_metal.errors import MetalError

DATA = Path(__file__).parent.parent / "monitor" / "data"
LOADED = DATA / "loaded.txt"
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 8.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc 0.25
"""


MODEL = {"name": "org/model", "status": "ok", "size_bytes": 4_200_000_000}


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        script.on("/metrics", replies(METRICS))
        script.on("/admin/status", replies({"uptime_s": 1, "models": [MODEL]}))
        yield script


@pytest.fixture
def mac(tmp_path: Path) -> FakeMac:
    fake = FakeMac(tmp_path / "mac")
    fake.show(ioreg=DATA / "ioreg_m1_max_loaded.txt", powermetrics=LOADED)
    return fake


@pytest.fixture
def environment(tmp_path: Path, mac: FakeMac) -> dict[str, str]:
    homes = dict.fromkeys(["HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"], str(tmp_path))
    return {**homes, "PATH": mac.path, "TERM": "xterm", "PYTHONUTF8": "1"}


Top = Callable[..., Result]


@pytest.fixture
def top(environment: dict[str, str]) -> Top:
    def run(*arguments: str, stdin: str = "", **variables: str) -> Result:
        arguments = ("top", "--interval", "0.1", *arguments)
        return CliRunner().invoke(app, arguments, input=stdin, env=environment | variables)

    return run


def test_one_look_without_rights(top: Top, server: Script) -> None:
    done = top("--url", server.url)
    assert done.exit_code == 0, done.exception
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "Apple M1 Max · 32 GPU cores · macOS 26.1 · read by ioreg",
        "fully loaded: 95% utilised",
    ]
    assert "models       org/model 4.2 GB" in lines
    assert "requests     8 running, 2 waiting" in lines
    assert "pressure     normal" in lines
    assert "GPU          2.5 GB in use, 4.4 GB allocated" in lines
    assert "prefill – tok/s, decode – tok/s" in done.stdout


def test_power_is_read_with_sudo(top: Top, server: Script) -> None:
    done = top("--power", "--url", server.url)
    assert done.exit_code == 0, done.exception
    assert "read by powermetrics + ioreg" in done.stdout
    assert "fully loaded: 100% active, 754 of 1578 MHz, 21.2 W" in done.stdout
    assert "granted      SW_P2 24%  SW_P3 76%" in done.stdout


def test_a_refusal_of_sudo_says_what_to_run(mac: FakeMac, environment: dict[str, str]) -> None:
    mac.refuse_sudo()
    done = subprocess.run(
        [METAL, "top", "--power"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(
        "error: `sudo -n powermetrics` was refused: sudo: a password is required\n\nhint: run `sudo -v`"
    )
    assert "| metal top --from -`" in done.stderr


def test_macmon_is_preferred_where_it_is_installed(top: Top, mac: FakeMac) -> None:
    mac.install_macmon(DATA / "macmon.json")
    done = top()
    assert "read by macmon + ioreg" in done.stdout
    assert "fully loaded: 98% active, 1296 MHz, 8.5 W" in done.stdout


def test_without_a_daemon_the_gpu_is_shown(top: Top) -> None:
    done = top("--url", "http://127.0.0.1:9")
    assert done.exit_code == 0
    assert "utilised" in done.stdout
    assert "no figures   no server answers at http://127.0.0.1:9" in done.stdout


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (replies("<html>"), "its figures are in another format"),
        (replies({"error": {"message": "not here"}}, 404), "not here"),
        (replies({"error": {"message": "a key is missing"}}, 401), "a key is missing"),
    ],
)
def test_a_server_without_figures_is_told(top: Top, server: Script, answer: object, words: str) -> None:
    server.on("/metrics", answer)
    done = top("--url", server.url)
    assert done.exit_code == 0
    assert words in done.stdout


@pytest.mark.skipif(sys.platform == "darwin", reason="its own tools answer")
def test_without_a_mac_the_engine_is_shown(top: Top, server: Script) -> None:
    done = top("--url", server.url, PATH="/usr/bin:/bin")
    assert done.exit_code == 0
    assert "no program here tells of a GPU of Apple's" in done.stdout
    assert "requests     8 running, 2 waiting" in done.stdout


def test_json(top: Top, server: Script) -> None:
    found = json.loads(top("--json", "--power", "--url", server.url).stdout)
    assert found["verdict"]["kind"] == "loaded"
    assert found["gpu"]["power_mw"] == 21200
    assert found["gpu"]["core_count"] == 32
    assert found["engine"]["num_running"] == 8
    assert found["host"]["pressure"] == "normal"


def test_a_recording_is_told_sample_by_sample(top: Top) -> None:
    done = top("--from", str(DATA / "t8.txt"), "--json")
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert [sample["verdict"]["kind"] for sample in samples] == ["busy", "loaded"]
    # A recording tells nothing of this machine.
    assert {sample["host"] for sample in samples} == {sample["engine"] for sample in samples} == {None}
    once = top("--from", str(DATA / "t8.txt"), "--once")
    assert "444 of 808 MHz" in once.stdout
    assert "8.1 W" not in once.stdout


def test_standard_input_is_read(top: Top, server: Script) -> None:
    done = top("--from", "-", "--url", server.url, stdin=LOADED.read_text())
    assert "fully loaded: 100% active, 754 of 1578 MHz, 21.2 W" in done.stdout
    assert "requests     8 running, 2 waiting" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "gone.txt"], "cannot read `gone.txt`: No such file or directory"),
        (["--from", "/"], "cannot read `/`: Is a directory"),
        (["--from", "-"], "standard input holds no sample of the GPU"),
        (["--url", "nowhere"], "`nowhere` is not a server's URL"),
    ],
)
def test_what_cannot_be_read_is_told(top: Top, arguments: list[str], words: str) -> None:
    done = top(*arguments)
    assert isinstance(done.exception, MetalError)
    assert done.exception.message == words
    assert done.exception.hint or "cannot read" in words
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "-", "--power"], "leave out one of"),
        (["--interval", "nan"], "must be from 0.1 to 3600"),
        (["--interval", "0"], "must be from 0.1 to 3600"),
    ],
)
def test_wrong_use_is_explained(top: Top, arguments: list[str], words: str) -> None:
    done = top(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_terminal_is_redrawn_until_ctrl_c_and_left_clean(
    environment: dict[str, str], server: Script
) -> None:
    arguments = ["top", "--power", "--interval", "0.1", "--url", server.url]
    with on_terminal(*arguments, env=environment) as terminal:
        terminal.expect("\x1b[?1049h")
        for _ in range(3):
            terminal.expect("fully loaded: 100% active, 754 of 1578 MHz, 21.2 W")
        terminal.type("\x03")
        terminal.expect("\x1b[?1049l")
        assert terminal.exit_code() == 0
        rest = terminal.raw
    assert "\x1b[?25l" not in rest
    lines = plain(rest).splitlines()
    assert "fully loaded: 100% active, 754 of 1578 MHz, 21.2 W" in lines
    assert "models       org/model 4.2 GB" in lines
    assert "requests     8 running, 2 waiting" in lines


def test_a_recording_on_a_terminal_leaves_its_last_sample(environment: dict[str, str]) -> None:
    with on_terminal("top", "--from", str(DATA / "t8.txt"), env=environment) as terminal:
        terminal.expect("\x1b[?1049l")
        assert terminal.exit_code() == 0
        assert "fully loaded: 100% active, 1398 of 1398 MHz, 8.1 W" in plain(terminal.raw)
