"""Whatever name a command prints for a model is a name that every command takes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

import tiny_folder
from server_process import METAL, ServerProcess

CONFIG = """\
[engine]
device = "cpu"
[models]
default = "tiny"
served_names = ["gpt"]
[models.aliases]
everyday = "other"
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A machine of two models, in a working folder that has another of the same name."""
    for name in ("models/tiny", "models/deep/other", "here/other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        tiny_folder.save(tmp_path / name)
    (tmp_path / "config.toml").write_text(CONFIG)
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "METAL_CONFIG": str(tmp_path / "config.toml"),
        "METAL_MODELS_DIR": str(tmp_path / "models"),
        "METAL_SERVER_UDS": str(tmp_path / "no.sock"),
    }


def metal(*arguments: object, env: dict[str, str]) -> str:
    done = subprocess.run(
        [METAL, *map(str, arguments)],
        env=env,
        cwd=Path(env["HOME"], "here"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_name_that_is_printed_is_taken(env: dict[str, str], tmp_path: Path) -> None:
    at = {name: str(tmp_path / "models" / name) for name in ("tiny", "deep/other")}
    with ServerProcess(env=env | {"METAL_SERVER_UDS": ""}) as server:
        server.ready()
        assert server.post("/v1/completions", {"model": "other", "prompt": "x", "max_tokens": 1})[0] == 200
        printed = {each["name"]: each["path"] for each in json.loads(metal("list", "--json", env=env))}
        shown = json.loads(metal("ps", "--json", "--url", server.url, env=env))
        assert [each["name"] for each in shown] == ["gpt", "other"]
        printed |= {each["name"]: each["path"] for each in shown}
        printed |= {"tiny": at["tiny"], "everyday": at["deep/other"]}
        assert set(printed.values()) == set(at.values())
        for name, path in printed.items():
            assert json.loads(metal("show", name, "--json", env=env))["path"] == path
            metal("stop", name, "--url", server.url, env=env)
            metal("load", name, "--url", server.url, env=env)
            status, told = server.get(f"/v1/models/{quote(name, safe='')}")
            assert (status, told["state"]) == (200, "ok")
            assert told["id"] == ("gpt" if path == at["tiny"] else "other")
        launched = metal("launch", "codex", "--dry-run", "-m", "tiny", "--url", server.url, env=env)
        assert "gpt" in launched


@pytest.mark.parametrize(("name", "model"), [("gpt", "tiny"), ("other", "deep/other")])
def test_by_commands_that_load_it_themselves_and_by_those_that_change_it(
    env: dict[str, str], tmp_path: Path, name: str, model: str
) -> None:
    assert metal("pull", name, env=env) == f"{tmp_path / 'models' / model}\n"
    metal("chat", "--local", name, "-q", "Hi", "--max-tokens", 1, env=env)
    metal("bench", "engine", name, "--batch", 1, "--output-len", 2, "--rounds", 1, env=env)
    quantized = metal("convert", name, "--bits", 8, "--group-size", 32, env=env).strip()
    assert Path(quantized).parent == tmp_path / "models"
    metal("rm", "--yes", Path(quantized).name, env=env)
    assert not Path(quantized).exists()
    metal("rm", "--yes", name, env=env)
    assert not (tmp_path / "models" / model).exists()


def test_serve_takes_it(env: dict[str, str]) -> None:
    with ServerProcess("other", "--served-model-name", "mine", env=env | {"METAL_SERVER_UDS": ""}) as server:
        server.ready()
        [told] = server.get("/admin/status")[1]["models"]
        assert (told["name"], told["path"]) == ("mine", f"{env['METAL_MODELS_DIR']}/deep/other")
    with ServerProcess("gpt", env=env | {"METAL_SERVER_UDS": ""}) as server:
        server.ready()
        [told] = server.get("/admin/status")[1]["models"]
        assert (told["name"], told["path"]) == ("gpt", f"{env['METAL_MODELS_DIR']}/tiny")
