"""Models come and go in a real server, as a user has them do on the command line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_folder
from server_process import METAL, ServerProcess


class Machine:
    def __init__(self, server: ServerProcess, env: dict[str, str]) -> None:
        self._server = server
        self._env = env

    def metal(self, *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [METAL, *arguments],
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == exit_code, (done.stderr, self._server.log)
        return done

    def models(self) -> dict[str, Any]:
        return {each["name"]: each for each in json.loads(self.metal("ps", "--json").stdout)}

    def states(self) -> dict[str, str]:
        return {name: each["status"] for name, each in self.models().items()}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "models").mkdir()
    for name in ("first", "second", "third"):
        tiny_folder.save(tmp_path / "models" / name)
    config = tmp_path / "config.toml"
    config.write_text(
        "[models]\naliases = { other = '~/models/second' }\n"
        "[models.other]\nttl = 0\nmax_model_len = 100\n"
        "[models.'~/models/third']\npinned = true\n"
    )
    env = {
        "HOME": str(tmp_path),
        "METAL_CONFIG": str(config),
        "METAL_MODELS_DIR": str(tmp_path / "models"),
        "HF_HOME": str(tmp_path / "hub"),
    }
    with ServerProcess(str(tmp_path / "models" / "first"), env=env) as server:
        server.ready()
        port = server.url.rpartition(":")[2]
        yield Machine(server, {**os.environ, **env, "METAL_SERVER_PORT": port})


def test_models_come_and_go(machine: Machine) -> None:
    assert machine.states() == {"first": "ok"}
    done = machine.metal("load", "other", "--keep-alive", "10m")
    assert "`other` is loaded and stays until it has been idle for 10 min\n" in done.stderr
    assert machine.metal("load", "~/models/third").stderr.endswith("`third` is loaded and pinned\n")

    models = machine.models()
    assert {name: each["status"] for name, each in models.items()} == dict.fromkeys(
        ("first", "other", "third"), "ok"
    )
    assert models["first"]["unloads_in_s"] is None
    assert 0 < models["other"]["unloads_in_s"] <= 600
    assert models["other"]["max_model_len"] == 100
    assert models["third"]["pinned"]
    assert machine.metal("list").stdout.count("  loaded now  ") == 3

    refused = machine.metal("rm", "--yes", "~/models/second", exit_code=1)
    assert "hint: run `metal stop other` first" in refused.stderr
    assert machine.metal("stop", "other").stderr == "`other` is unloaded\n"
    machine.metal("rm", "--yes", "~/models/second")

    machine.metal("stop", "--all")
    assert set(machine.states().values()) == {"unloaded"}
    machine.metal("status")
    machine.metal("chat", "third", "-q", "Hi", "--max-tokens", "1")
    assert machine.states() == {"first": "unloaded", "third": "ok"}
