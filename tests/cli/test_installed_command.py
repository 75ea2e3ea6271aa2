"""`metal list`, `metal rm` and `metal convert` as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import scripted_server
import tiny_folder
from server_process import METAL, ServerProcess
from terminal import on_terminal


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "METAL_MODELS_DIR": str(tmp_path / "models"),
        "METAL_SERVER_UDS": str(tmp_path / "no.sock"),
    }


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tiny_folder.save(tmp_path / "models" / "tiny")


def metal(*arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [METAL, *map(str, arguments)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_an_empty_machine_is_told_what_there_is(env: dict[str, str]) -> None:
    done = metal("list", env=env)
    assert (done.returncode, done.stdout) == (0, "")
    assert "`metal list --known`" in done.stderr
    assert metal("list", "--json", env=env).stdout == "[]\n"


def test_list(env: dict[str, str], tiny: Path) -> None:
    rows = metal("list", env=env).stdout.splitlines()
    assert rows[0].split() == ["MODEL", "KIND", "SIZE", "FORMAT", "CONTEXT", "LAST", "USED", "FROM"]
    assert rows[1].startswith("~/models/tiny  ")
    assert rows[1].endswith(" 4096     never      models.dir")

    (told,) = json.loads(metal("list", "--json", env=env).stdout)
    assert told.pop("size_bytes") == sum(path.stat().st_size for path in tiny.iterdir())
    assert told == {
        "name": "~/models/tiny",
        "path": str(tiny),
        "origin": "models.dir",
        "kind": "generate",
        "number_format": None,
        "context_length": 4096,
        "last_used": None,
        "loaded": False,
    }


def test_list_of_known_models(env: dict[str, str]) -> None:
    rows = metal("list", "--known", env=env).stdout.splitlines()
    assert rows[0].split() == ["MODEL", "FOR", "SIZE", "NEEDS", "REPOSITORY"]
    assert ["qwen3-8b", "chat", "4.6", "GB", "16", "GB", "mlx-community/Qwen3-8B-4bit"] in [
        row.split() for row in rows
    ]
    assert {model["kind"] for model in json.loads(metal("list", "--known", "--json", env=env).stdout)} == {
        "chat",
        "code",
        "small",
    }


def test_rm_asks_first(env: dict[str, str], tiny: Path) -> None:
    refused = metal("rm", "~/models/tiny", env=env)
    assert refused.returncode == 1
    assert "error: `metal rm` asks first, and here is no terminal" in refused.stderr

    with on_terminal("rm", "~/models/tiny", env=env) as terminal:
        terminal.expect("remove? [y/N] ")
        terminal.type("n\n")
        terminal.expect("nothing was removed")
        assert terminal.exit_code() == 0
    assert tiny.exists()

    with on_terminal("rm", "~/models/tiny", env=env) as terminal:
        terminal.expect("remove? [y/N] ")
        terminal.type("y\n")
        terminal.expect("removed")
        assert terminal.exit_code() == 0
    assert not tiny.exists()


def test_rm_knows_models_alone(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    done = metal("rm", "--yes", tmp_path / "documents", env=env)
    assert done.returncode == 1
    assert "is not among the models on this machine" in done.stderr
    assert (tmp_path / "documents").exists()


@pytest.mark.parametrize(("status", "exit_code"), [("ok", 1), ("loading", 1), ("failed", 0), ("unloaded", 0)])
def test_rm_leaves_what_the_server_has_loaded(
    env: dict[str, str], tiny: Path, tmp_path: Path, status: str, exit_code: int
) -> None:
    socket = Path(env["METAL_SERVER_UDS"])
    with scripted_server.serving(socket=socket) as script:
        models = [
            {"name": "y", "status": "loading", "path": None},
            {"name": "z", "status": "ok", "path": str(tiny.parent)},
            {"name": "x", "status": status, "path": str(tiny)},
        ]
        script.on("/admin/status", scripted_server.replies({"uptime_s": 1, "models": models}))
        done = metal("rm", "--yes", "~/models/tiny", env=env)
    assert done.returncode == exit_code, done.stderr
    assert tiny.exists() == bool(exit_code)
    if exit_code:
        assert f"error: `~/models/tiny` is loaded by the server at unix:{socket}" in done.stderr
        assert "hint: run `metal stop x` first" in done.stderr


def test_rm_deletes_nothing_when_the_server_does_not_tell(env: dict[str, str], tiny: Path) -> None:
    with scripted_server.serving(socket=Path(env["METAL_SERVER_UDS"])) as script:
        script.on("/admin/status", scripted_server.refuses(401, "no key"))
        assert metal("rm", "--yes", "~/models/tiny", env=env).returncode == 1
    assert tiny.exists()


def test_a_real_server_says_which_model_it_has_loaded(
    env: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    with ServerProcess(str(tiny), env={name: env[name] for name in ("HOME", "METAL_MODELS_DIR")}) as server:
        server.ready()
        port = server.url.rpartition(":")[2]
        del env["METAL_SERVER_UDS"]
        env["METAL_SERVER_PORT"] = port
        assert "  loaded now  " in metal("list", env=env).stdout
        done = metal("rm", "--yes", "~/models/tiny", env=env)
        assert "is loaded by the server" in done.stderr
        assert server.stop() == 0
    assert metal("list", env=env).stdout.splitlines()[1].split()[-2] == "ago"
    assert metal("rm", "--yes", "~/models/tiny", env=env).returncode == 0
    assert not tiny.exists()


def test_convert_puts_the_new_model_among_the_others(env: dict[str, str], tiny: Path) -> None:
    done = metal("convert", tiny, "--bits", "8", "--group-size", "32", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tiny.parent / 'tiny-8bit'}\n"
    assert done.stderr == "reading `tiny`\nquantizing `tiny` to 8 bits\n"
    formats = {
        each["name"]: each["number_format"] for each in json.loads(metal("list", "--json", env=env).stdout)
    }
    assert formats == {"~/models/tiny": None, "~/models/tiny-8bit": "8-bit"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--bits", "7"), "`--bits` cannot be 7"),
        (("--group-size", "48"), "`--group-size` cannot be 48"),
        (("--dtype", "int3"), "`--dtype` must be"),
    ],
)
def test_convert_refuses_what_cannot_be(
    env: dict[str, str], tiny: Path, options: tuple[str, str], error: str
) -> None:
    done = metal("convert", tiny, *options, env=env)
    assert done.returncode == 1
    assert f"error: {error}" in done.stderr
