"""`metal doctor` on a fake Mac, with each fault of the machine injected."""

from __future__ import annotations

import plistlib
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from doctor_run import doctor, faults, of_another, prepare
from fake_mac import FakeMac
from scripted_server import Answer, Script, replies, serving
from vllm_metal import client
from vllm_metal.cli.main import app


@pytest.fixture
def mac(tmp_path: Path) -> FakeMac:
    return FakeMac(tmp_path / "mac")


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        yield script


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, mac: FakeMac, server: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, mac, server, monkeypatch)


def test_a_healthy_mac_has_no_fault() -> None:
    code, found = doctor()
    assert code == 0
    assert faults(found) == {}
    assert found["Python"]["message"].endswith("native arm64")
    assert found["macOS"]["message"] == "26.1"
    assert found["wired limit"]["message"] == "macOS decides"
    assert list(found) == [
        *("Python", "macOS", "versions", "venv", "configuration", "device", "GPU", "memory", "swap"),
        *("wired limit", "disk", "model", "service", "port", "daemon", "model folders", "under load"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "subject", "level", "words"),
    [
        ("sysctl.proc_translated", "1", "Python", "problem", "Rosetta"),
        ("hw.optional.arm64", None, "Python", "problem", "not Apple Silicon"),
        ("kern.memorystatus_vm_pressure_level", "2", "memory", "warning", "warning memory pressure"),
        ("kern.memorystatus_vm_pressure_level", "4", "memory", "problem", "critical memory pressure"),
        (
            "vm.swapusage",
            "total = 9000.00G  used = 8000.00G  free = 1000.00G",
            "swap",
            "warning",
            "swapped out",
        ),
        ("iogpu.wired_limit_mb", "999999999", "wired limit", "warning", "iogpu.wired_limit_mb"),
    ],
)
def test_a_fault_of_the_machine(
    mac: FakeMac, name: str, value: str | None, subject: str, level: str, words: str
) -> None:
    mac.set(name, value)
    code, found = doctor()
    assert code == (1 if level == "problem" else 0)
    finding = found[subject]
    assert finding["level"] == level
    assert words in finding["message"]
    assert finding["why"]
    assert finding["hint"]
    assert faults(found).keys() <= {subject}


def test_a_limit_that_leaves_enough_is_fine(mac: FakeMac) -> None:
    mac.set("iogpu.wired_limit_mb", str(psutil.virtual_memory().total // 2 // 2**20))
    _, found = doctor()
    assert found["wired limit"]["level"] == "ok"


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("13.7.8", "problem"),
        ("14.7", "warning"),
        ("15.0", "ok"),
        ("16.1", "ok"),
        ("26.2", "ok"),
        ("27.0", "ok"),
    ],
)
@pytest.mark.parametrize("compatibility", ["0", "1"])
def test_the_version_of_macos(mac: FakeMac, version: str, level: str, compatibility: str) -> None:
    mac.set_version(version)
    code, found = doctor(SYSTEM_VERSION_COMPAT=compatibility)
    assert code == (1 if level == "problem" else 0)
    assert found["macOS"]["level"] == level
    assert version.replace("16.", "26.") in found["macOS"]["message"]


def test_a_version_that_nobody_tells(mac: FakeMac) -> None:
    mac.set_version("10.16")
    _, found = doctor()
    # Nothing is left that says that this is a Mac, unless it is one.
    assert found["macOS"]["level"] in ("skipped", "warning")


@pytest.mark.parametrize(
    ("variables", "origin"),
    [
        ({"VLLM_MLX_DEVICE": "cpu"}, "environment VLLM_MLX_DEVICE"),
        ({"VLLM_METAL_USE_MLX": "0"}, "environment VLLM_METAL_USE_MLX"),
        ({"METAL_ENGINE_DEVICE": "cpu"}, "environment METAL_ENGINE_DEVICE"),
    ],
)
def test_the_cpu_by_environment(variables: dict[str, str], origin: str) -> None:
    code, found = doctor(**variables)
    assert code == 1
    assert found["device"]["level"] == "problem"
    assert origin in found["device"]["message"]


def test_the_cpu_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[engine]\ndevice = "cpu"\n')
    code, found = doctor("--config", str(file))
    assert code == 1
    assert "mine.toml line 2" in found["device"]["message"]


@pytest.mark.parametrize(
    ("entries", "level", "words"),
    [
        ({"EnvironmentVariables": {"VLLM_MLX_DEVICE": "cpu"}}, "problem", "environment VLLM_MLX_DEVICE"),
        ({"EnvironmentVariables": {"VLLM_METAL_USE_MLX": "0"}}, "problem", "VLLM_METAL_USE_MLX"),
        ({"EnvironmentVariables": {"VLLM_METAL_USE_MLX": "maybe"}}, "problem", "must be 0 or 1"),
        ({"EnvironmentVariables": {"PATH": "/bin"}}, "ok", "`auto`"),
        ({"EnvironmentVariables": ["VLLM_MLX_DEVICE"]}, "ok", "`auto`"),
        ({}, "ok", "`auto`"),
        (None, "ok", "`auto`"),
    ],
)
def test_the_cpu_by_the_service(
    tmp_path: Path, entries: dict[str, Any] | None, level: str, words: str
) -> None:
    file = tmp_path / "Library" / "LaunchAgents" / "org.vllm-metal.serve.plist"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"<plist>" if entries is None else plistlib.dumps(entries))
    code, found = doctor()
    assert code == (1 if level == "problem" else 0)
    assert found["service's device"]["level"] == level
    assert words in found["service's device"]["message"]
    assert found["device"]["level"] == "ok"


def test_a_configuration_that_is_wrong_is_one_finding_among_others(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[server]\nport = 'many'\n")
    code, found = doctor("--config", str(file))
    assert code == 1
    assert found["configuration"]["level"] == "problem"
    assert "`server.port`" in found["configuration"]["message"]
    assert found["device"]["level"] == "skipped"
    assert found["macOS"]["level"] == "ok"


def test_a_key_that_no_client_can_send_is_found() -> None:
    _, found = doctor(VLLM_API_KEY="schlüssel")
    assert found["configuration"]["level"] == "problem"


def test_a_daemon_that_loads_is_a_warning(server: Script) -> None:
    server.on("/ready", replies({"status": "loading", "detail": "loading `smollm2`"}, 503))
    code, found = doctor()
    assert code == 0
    assert found["daemon"]["level"] == "warning"
    assert "loading `smollm2`" in found["daemon"]["message"]
    assert found["port"]["level"] == "ok"


@pytest.mark.parametrize(
    "answer",
    [
        replies(""),
        replies("<html>Hello</html>"),
        replies({"error": "gone"}, 404),
        # As servers of other programs say that they are well, or not yet.
        replies({"status": "ok"}),
        replies({"error": {"message": "Loading model"}}, 503),
    ],
)
def test_a_port_that_another_server_has(server: Script, answer: Answer) -> None:
    server.on("/health", of_another(answer))
    code, found = doctor()
    assert code == 1
    assert found["port"]["level"] == "problem"
    assert "taken by another program" in found["port"]["message"]
    assert "lsof -nP -iTCP:" in found["port"]["hint"]
    assert "daemon" not in found


def test_a_port_whose_owner_does_not_answer(server: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REPLY_TIMEOUT_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        code, found = doctor(METAL_SERVER_PORT=str(port))
    assert code == 1
    assert found["port"]["level"] == "problem"
    # It may be ours, which hangs: nothing says that it is not.
    assert found["port"]["message"].startswith(f"port {port} is taken, and nothing tells by whom: ")
    assert "restart it if it is `metal`" in found["port"]["hint"]


def test_no_daemon_is_a_warning() -> None:
    with closing(socket.socket()) as held:
        # Bound but not listening: nobody else can take it, and nobody answers.
        held.bind(("127.0.0.1", 0))
        code, found = doctor(METAL_SERVER_PORT=str(held.getsockname()[1]))
    assert code == 0
    assert found["port"]["level"] == "ok"
    assert found["daemon"]["level"] == "warning"
    assert "metal serve" in found["daemon"]["hint"]


def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    _, found = doctor(METAL_SERVER_UDS=str(tmp_path / "metal.sock"))
    assert found["port"]["message"] == f"`{tmp_path / 'metal.sock'}` is free"


def test_any_free_port_tells_nothing() -> None:
    _, found = doctor(METAL_SERVER_PORT="0")
    assert found["daemon"]["level"] == "skipped"


@pytest.mark.skipif(sys.platform == "darwin", reason="its own tools answer")
def test_elsewhere_than_on_a_mac_its_checks_are_skipped() -> None:
    code, found = doctor(PATH="/usr/bin:/bin")
    assert code == 0
    skipped = {name for name, finding in found.items() if finding["level"] == "skipped"}
    assert skipped == {"Python", "macOS", "wired limit", "venv", "model", "service"}
    assert all("not a Mac" in found[name]["message"] for name in ("Python", "macOS", "wired limit"))


def test_the_words(mac: FakeMac) -> None:
    mac.set("sysctl.proc_translated", "1")
    mac.set_version("14.5")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("problem  Python            3.")
    assert lines[1] == " " * 27 + "MLX needs a native Python: a translated one has no Metal GPU"
    assert lines[2].startswith(" " * 27 + "hint: install Homebrew in `/opt/homebrew`")
    assert "warning  macOS             14.5 cannot keep a model's memory wired" in lines
    assert "ok       wired limit       macOS decides" in lines
    assert done.stderr.startswith("\n1 problem, 1 warning")
