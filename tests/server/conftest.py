"""A server over a tiny model, a token a byte: fast, and its answers hold every kind of broken text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tiny_folder
from server_process import ServerProcess

MAX_QUEUED = 24


@pytest.fixture(scope="package")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for all tests that leave it as they found it."""
    folder = tiny_folder.save(tmp_path_factory.mktemp("model") / "tiny")
    with ServerProcess(str(folder), env={"METAL_SERVER_MAX_QUEUED": str(MAX_QUEUED)}) as process:
        yield process.ready()
