"""`metal status` where launchd keeps the server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from mac_user import DEADLINE_S, User
from server_process import METAL
from vllm_metal import __version__


def metal_status(user: User, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [METAL, "status", *arguments],
        env=user.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def test_a_service_that_is_not_installed(user: User) -> None:
    done = metal_status(user)
    assert done.returncode == 3
    assert "service   the service is not installed: run `metal service install`\n" in done.stdout
    assert "error: no server answers" in done.stderr


def test_a_service_without_a_model(user: User, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    user.config(model=tmp_path / "empty")
    user.does("install")
    user.status_when(lambda status: "is empty" in (status["health_detail"] or ""))
    done = metal_status(user)
    assert done.returncode == 3
    assert f"server    vllm-metal {__version__} at unix:{user.socket}, pid " in done.stdout
    assert "requests  0 running, 0 waiting\n" in done.stdout
    assert f"service   the server has no model: `{tmp_path / 'empty'}` is empty" in done.stdout
    told = json.loads(metal_status(user, "--json").stdout)
    assert told["server"]["pid"] == told["service"]["pid"]
    assert told["server"]["models"][0]["status"] == "failed"
