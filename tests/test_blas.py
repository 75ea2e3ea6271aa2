"""Without a preloaded BLAS the log tells how to get one."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_metal.engine.mlx import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has a fast BLAS of its own")

WARN = """
import logging, mlx.core, numpy
from vllm_metal.engine.mlx import blas
logging.basicConfig(format="%(message)s")
blas.warn_if_slow()
"""


def warning(preload: str) -> str:
    env = {**os.environ, "LD_PRELOAD": preload}
    return subprocess.run(
        [sys.executable, "-c", WARN], env=env, capture_output=True, text=True, check=True
    ).stderr


def test_the_line_to_run_helps() -> None:
    told = warning("")
    assert "slower" in told
    remedy = re.search(r"`export LD_PRELOAD=(\S+)`", told)
    if remedy is None:
        pytest.skip("OpenBLAS is not installed")
    assert warning(remedy[1]) == ""


def test_without_openblas_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blas, "_LIBRARY_ROOT", tmp_path)
    monkeypatch.setattr(blas, "_is_preloaded", lambda: False)
    caplog.set_level(logging.WARNING)
    blas.warn_if_slow()
    assert "libopenblas0-pthread" in caplog.text
