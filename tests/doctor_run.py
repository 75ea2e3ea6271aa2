"""`metal doctor` on a fake Mac with a scripted daemon, both healthy until a test says otherwise."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_mac import FakeMac
from scripted_server import Answer, Handler, Script, chunk, event, replies
from vllm_metal.cli.main import app
from vllm_metal.monitor import active_probe, mlx_process

DATA = Path(__file__).parent / "monitor" / "data"

#: Of which machine the figures are told by the test's own: whatever it has left.
OF_THIS_MACHINE = {"disk", "swap"}

Found = dict[str, dict[str, Any]]


def prepare(tmp_path: Path, mac: FakeMac, daemon: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, and what the Mac and the daemon say."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PATH", mac.path)
    monkeypatch.setenv("METAL_SERVER_PORT", daemon.url.rpartition(":")[2])
    monkeypatch.setattr(mlx_process, "PYTHON", mac.mlx_python)
    monkeypatch.setattr(active_probe, "SAMPLE_S", 0.1)
    mac.show(ioreg=DATA / "ioreg_m1_max_loaded.txt")
    for path in ("/health", "/ready"):
        daemon.on(path, replies({"status": "ok"}))
    daemon.on("/admin/model-folders", replies({"folders": [{"path": "/models", "readable": True}]}))
    daemon.on("/admin/status", replies({"uptime_s": 1, "models": []}))
    daemon.on("/metrics", replies(running(4)))
    daemon.on_chat(generates)


def running(num_requests: int) -> str:
    return f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {num_requests}\n"


def of_another(answer: Answer) -> Answer:
    """The same from a server that is not ours."""

    def foreign(handler: Handler) -> None:
        handler.server_version = "llama.cpp"
        answer(handler)

    return foreign


def generates(handler: Handler) -> None:
    """Until the client leaves."""
    handler.begin_events()
    while True:
        handler.send_chunk(event(chunk("one ")))
        time.sleep(0.01)


def doctor(*arguments: str, **variables: str) -> tuple[int, Found]:
    """The exit code, and the findings by subject."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments], env=variables)
    findings = json.loads(result.stdout)
    found = {finding["subject"]: finding for finding in findings}
    assert len(found) == len(findings)
    return result.exit_code, found


def faults(found: Found) -> dict[str, str]:
    return {
        name: each["level"]
        for name, each in found.items()
        if each["level"] in ("warning", "problem") and name not in OF_THIS_MACHINE
    }
