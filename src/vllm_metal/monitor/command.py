"""Runs the system's own tools and gives what they print."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

TIMEOUT_S: Final = 10.0

# What a login shell may lack: `sysctl` and `ioreg` are in `/usr/sbin`.
_SYSTEM_FOLDERS = "/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class Finished:
    """`exit_code` is None where the program is missing or did not end in time."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""


def run(*arguments: str, timeout_s: float = TIMEOUT_S) -> Finished:
    """Run a program to its end, in no language but its own and unable to ask anything."""
    environment = {
        **os.environ,
        "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}",
        "LC_ALL": "C",
        # With 1, or left to itself, macOS tells old programs a version they were made for.
        "SYSTEM_VERSION_COMPAT": "0",
    }
    pipe = subprocess.PIPE
    try:
        # With its path known and no files to close, Python spawns: a fork would copy the map of a server's
        # whole memory, and hold up its threads meanwhile.
        process = subprocess.Popen(
            (shutil.which(arguments[0], path=environment["PATH"]) or arguments[0], *arguments[1:]),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=environment,
            close_fds=False,
        )
    except OSError:
        return Finished(None)
    # `subprocess.run` would also kill on Ctrl-C, and fail where it may not: what `sudo` runs is root's.
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(PermissionError):
                process.kill()
            return Finished(None)
    return Finished(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
