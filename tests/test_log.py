"""The log: where it goes, and what it does when it cannot go there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from vllm_metal import log
from vllm_metal.errors import ConfigError


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("vllm_metal")
    kept = root.handlers[:], root.level, ours.level, logging.raiseExceptions
    yield
    for handler in root.handlers:
        if handler not in kept[0]:
            with suppress(OSError):
                handler.close()
    root.handlers[:], root.level, ours.level, logging.raiseExceptions = kept


def test_records_go_to_the_file_from_the_level_on(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "metal.log"
    log.setup("warning", str(file))
    logging.getLogger("vllm_metal.engine").info("quiet")
    logging.getLogger("vllm_metal.engine").warning("loud")
    [line] = file.read_text().splitlines()
    assert line.endswith("WARNING vllm_metal.engine: loud")


def test_a_large_file_is_put_aside_and_four_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "metal.log"
    log.setup("info", str(file))
    for _ in range(60):
        logging.getLogger("vllm_metal").info("x" * 1024 * 1024)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 5
    assert max(sizes) <= 10 * 1024 * 1024


def test_a_file_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot log to"):
        log.setup("info", str(tmp_path / "file" / "metal.log"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    log.setup("info", "/dev/full")
    logging.getLogger("vllm_metal").info("lost")
    assert capfd.readouterr().err == ""
