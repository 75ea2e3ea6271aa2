"""Runs a client's program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 240

#: What clients would fetch when they start.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    stdin: str = "",
    bin_folder: Path | None = None,
    **env: str,
) -> str:
    """What it wrote to stdout, if it ended well. `bin_folder` comes first on its PATH."""
    if bin_folder is not None:
        env["PATH"] = f"{bin_folder}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        input=stdin,
        env={**os.environ, **_OFFLINE, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
