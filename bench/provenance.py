"""What a kept result says of itself beside its figures: when, how and where it was measured."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_metal.bench.machine import machine, versions


def save(path: Path, **figures: Any) -> None:
    """Write the `figures` of the script that runs as JSON."""
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "versions": versions(),
        **figures,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def commit(folder: Path) -> str | None:
    """The commit that `folder` is at, marked where files differ from it; None without a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        described = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return described.stdout.strip() or None
