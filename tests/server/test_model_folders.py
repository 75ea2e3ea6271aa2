"""GET /admin/model-folders: what the server itself may read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from in_process import MODEL, ask

from vllm_metal.hub import folders as hub_folders
from vllm_metal.server import folders
from vllm_metal.settings import ModelsConfig

ROUTE = "/admin/model-folders"


def test_each_folder_is_read() -> None:
    found = ask("GET", ROUTE).json["folders"]
    assert [folder["path"] for folder in found][1:] == [str(ModelsConfig().store), MODEL]
    assert all(folder["readable"] for folder in found)


def test_only_those_with_a_key_are_told() -> None:
    assert ask("GET", ROUTE, api_keys=("secret",)).status == 401


def test_a_folder_that_never_answers_is_said_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a volume that macOS keeps from agents."""
    done = threading.Event()

    def read_problem(path: Path) -> str | None:
        return str(done.wait()) if str(path) == MODEL else None

    monkeypatch.setattr(hub_folders, "read_problem", read_problem)
    monkeypatch.setattr(folders, "_READ_TIMEOUT_S", 0.1)
    try:
        *others, last = ask("GET", ROUTE).json["folders"]
    finally:
        done.set()
    assert all(folder["readable"] for folder in others)
    assert last == {"path": MODEL, "readable": False, "detail": "it cannot be read within 0.1 s"}


def test_what_the_system_says_of_a_path_is_kept(tmp_path: Path) -> None:
    assert hub_folders.read_problem(tmp_path) is None
    assert hub_folders.read_problem(tmp_path / "missing") is None
    assert hub_folders.read_problem(tmp_path / ("long" * 100)) == "File name too long"
