"""Talks to `launchctl`: the verbs we need, what its codes mean, and what `print` tells of a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.errors import ServiceError
from vllm_metal.settings import EXIT_TIMEOUT_S

NO_SUCH_PROCESS = 3
IO_ERROR = 5
IN_PROGRESS = 36
ALREADY_IN_PROGRESS = 37
NO_SUCH_SERVICE = 113

_MEANINGS = {
    NO_SUCH_PROCESS: "the service is not loaded",
    IO_ERROR: "launchd gives no reason; the service may still be stopping, or be switched off in Login Items",
    IN_PROGRESS: "the service is still stopping",
    ALREADY_IN_PROGRESS: "the service is loaded already",
    64: "launchctl was called wrongly",
    109: "the plist is not one",
    110: "the plist has no valid label",
    111: "the plist names no program",
    112: "there is no such domain: nobody is logged in",
    NO_SUCH_SERVICE: "the service is not loaded",
    119: "the service is disabled",
    122: "the plist belongs to somebody else, or others may write to it",
    125: "the domain does not take services: nobody is logged in at the screen",
    134: "the service is not for sessions of this kind",
    155: "macOS holds the program in quarantine",
}

_TIMEOUT_S = 30
# It may wait for the service to end.
_BOOTOUT_TIMEOUT_S = EXIT_TIMEOUT_S + 10


@dataclass(frozen=True, slots=True)
class Job:
    """A loaded service, as `launchctl print` shows it; what it did not show is None."""

    path: str | None = None
    state: str | None = None
    pid: int | None = None
    last_exit: str | None = None
    """Like `(never exited)`, `1`, `78: EX_CONFIG`, `Terminated: 15` or `JETSAM_REASON_MEMORY_…`."""
    spawn_type: str | None = None


_FIELD = re.compile(r"^\t([^\s=][^=\n]*?) = (.*)$", re.MULTILINE)
_LAST_EXIT = ("last terminating signal", "last exit reason", "last exit code")


def parse_job(text: str) -> Job:
    """Only lines behind one tab are the job's own: blocks inside repeat their names. Never raises."""
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        fields.setdefault(name, value.strip())
    pid = fields.get("pid", "")
    return Job(
        path=fields.get("path"),
        state=fields.get("state"),
        # More digits than a pid has are something else.
        pid=int(pid) if re.fullmatch(r"[0-9]{1,10}", pid) else None,
        last_exit=next((fields[name] for name in _LAST_EXIT if name in fields), None),
        spawn_type=fields.get("spawn type"),
    )


def parse_disabled(text: str) -> set[str]:
    """The labels that `print-disabled` shows as disabled; older systems say true."""
    return set(re.findall(r'^\s*"([^"\n]+)" => (?:disabled|true)\s*$', text, re.MULTILINE))


def meaning(code: int) -> str:
    return f"{code}: {_MEANINGS.get(code, f'see `launchctl error {code}`')}"


def domains() -> tuple[str, str]:
    """Where a user's services can be: in the session at the screen, and without one."""
    return f"gui/{os.getuid()}", f"user/{os.getuid()}"


def has_domain(domain: str) -> bool:
    return _run("print", domain).returncode == 0


def find_job(target: str) -> Job | None:
    """`target` is domain/label; None if it is not loaded."""
    done = _run("print", target)
    return parse_job(done.stdout) if done.returncode == 0 else None


def is_disabled(domain: str, label: str) -> bool:
    return label in parse_disabled(_run("print-disabled", domain).stdout)


def bootstrap(domain: str, plist: Path) -> int:
    return _run("bootstrap", domain, str(plist)).returncode


def bootout(target: str) -> int:
    return _run("bootout", target, timeout_s=_BOOTOUT_TIMEOUT_S).returncode


def kickstart(target: str) -> int:
    """Start the service unless it runs."""
    return _run("kickstart", target).returncode


def enable(target: str) -> int:
    return _run("enable", target).returncode


def require() -> str:
    """The path of `launchctl`; raises ServiceError where there is none."""
    program = shutil.which("launchctl")
    if program is None:
        raise ServiceError(
            "there is no `launchctl` here: the service is for macOS",
            hint="`metal service plist` shows what it would be; `metal serve` runs the server itself",
        )
    return program


def _run(*arguments: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    program = require()
    try:
        return subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except OSError as exc:
        raise ServiceError(f"`{program}` cannot be run: {exc.strerror}") from exc
    except subprocess.TimeoutExpired as exc:
        raise ServiceError(
            f"`launchctl {' '.join(arguments)}` gave no answer within {timeout_s:g} s",
            hint="launchd may be out of order until you log in anew",
        ) from exc
