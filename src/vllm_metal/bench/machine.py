"""What a result was measured on, and with."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from vllm_metal import __version__

_PACKAGES = ("mlx", "mlx-lm", "aiohttp", "transformers")


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "model": _sysctl("hw.model"),
        "cpu": _sysctl("machdep.cpu.brand_string") or _linux_cpu() or platform.processor(),
        "gpu": _answer("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def versions() -> dict[str, str]:
    found = {"vllm-metal": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _sysctl(name: str) -> str | None:
    # Linux has a command of that name too, which knows none of these.
    return _answer("sysctl", "-n", name) if platform.system() == "Darwin" else None


def _answer(*command: str) -> str | None:
    """What a command prints; None where it is not there or fails."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip() or None


def _linux_cpu() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None
