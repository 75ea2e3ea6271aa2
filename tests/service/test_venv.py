"""Versions of the venv: what runs from one keeps it, and nobody starts from one that goes."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from keg import stamp
from vllm_metal.service import venv


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "venv"


def _version(path: Path, name: str) -> Path:
    version = venv.versions_dir(path) / name
    version.mkdir(parents=True)
    stamp(version)
    return version


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:40], lambda _: "[]", lambda text: text.replace('"version"', '"later"')]
    + [lambda text, name=name: json.dumps(json.loads(text) | {name: 3}) for name in ("python", "launcher")],
)
def test_what_is_no_stamp_is_none(path: Path, damage: Callable[[str], str]):
    version = _version(path, "0.1.0-9a04c7e3-1")
    assert venv.read_stamp(version)
    path_of_stamp = version / "vllm-metal.json"
    path_of_stamp.write_text(damage(path_of_stamp.read_text()))
    assert venv.read_stamp(version) is None


def test_a_version_that_goes_at_that_moment_is_not_held(path: Path):
    version = _version(path, "0.1.0-9a04c7e3-1")
    path_of_stamp = version / "vllm-metal.json"
    raised: list[BaseException] = []

    def hold() -> None:
        try:
            venv.hold(version)
        except FileNotFoundError as exc:
            raised.append(exc)

    with path_of_stamp.open() as file:
        # As whoever removes it does; `hold` waits, or comes too late.
        fcntl.flock(file, fcntl.LOCK_EX)
        holding = threading.Thread(target=hold)
        holding.start()
        path_of_stamp.unlink()
    holding.join()
    assert len(raised) == 1


def test_only_what_nothing_runs_from_is_pruned(path: Path):
    old, held, current = (_version(path, f"0.{minor}.0-9a04c7e3-1") for minor in range(3))
    venv.switch(path, current)
    with (held / "vllm-metal.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        venv.prune(path)
        assert [old.exists(), held.exists(), current.exists()] == [False, True, True]
    venv.prune(path)
    assert not held.exists()
    assert path.samefile(current)
