"""A `launchctl` that behaves as macOS's was seen to, and behind it launchd: a supervisor for each job.

Run as a program it is `launchctl`. A test makes a `FakeLaunchd` and puts its `bin` on PATH; all state is
on disk.
"""

# ruff: noqa: T201

from __future__ import annotations

import fcntl
import json
import os
import plistlib
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

DEADLINE_S = 30
_POLL_S = 0.02
_DEFAULT_EXIT_TIMEOUT_S = 5
# Tests would wait ten seconds for each new start.
_THROTTLE_SCALE = 0.02
_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_USER_VARIABLES = ("USER", "LOGNAME", "SHELL", "TMPDIR")

_TEXTS = {
    3: "No such process",
    5: "Input/output error",
    36: "Operation now in progress",
    37: "Operation already in progress",
    112: "Could not find specified domain",
    113: "Could not find specified service",
    125: "Domain does not support specified action",
}

_KNOBS: dict[str, Any] = {
    # Code by domain that is not there: 112, or 125 for gui/UID over ssh.
    "absent": {},
    # What `bootstrap` answers for what is loaded; other versions of macOS give 37.
    "loaded_code": 5,
    # So many calls of `bootstrap` are refused with 5, as while a label is still draining.
    "num_refusals": 0,
    # `bootout` answers 36 at once and lets the job drain.
    "leaves_draining": False,
    "exit_timeout_scale": 1.0,
    # Jobs end when this process does.
    "owner": 0,
    # Of the user, whatever the environment of the caller says.
    "home": "/",
}


class FakeLaunchd:
    """The test's side: knobs, what was called, and the end of all jobs."""

    def __init__(self, folder: Path, *, home: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        program = self.bin / "launchctl"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{folder}" "$@"\n')
        program.chmod(0o755)
        self.set(owner=os.getpid(), home=str(home))

    def set(self, **knobs: Any) -> None:
        path = self.folder / "knobs.json"
        _write_json(path, _read_json(path, _KNOBS) | knobs)

    def calls(self, verb: str | None = None) -> list[list[str]]:
        """The arguments of each call, `print`s left out unless asked for."""
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if (call[0] == verb if verb else not call[0].startswith("print"))]

    def call(self, *arguments: str) -> None:
        subprocess.run([self.bin / "launchctl", *arguments], check=True)

    def jobs(self) -> list[_Job]:
        """Those that are loaded."""
        return [_Job(path.parent) for path in self.folder.glob("jobs/*/*/facts.json")]

    def close(self) -> None:
        """End every supervisor and whatever it runs."""
        for path in self.folder.glob("jobs/*/*/alive"):
            _Job(path.parent).abort()


class _Job:
    """One loaded service: a folder with its plist and what its supervisor tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def plist(self) -> dict[str, Any]:
        return plistlib.loads((self.folder / "job.plist").read_bytes())

    @property
    def facts(self) -> dict[str, Any]:
        return _read_json(self.folder / "facts.json", {})

    @property
    def is_loaded(self) -> bool:
        return (self.folder / "facts.json").exists()

    def ask(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, KeyError):
            os.kill(self.facts["supervisor"], number)

    def wait_until_gone(self) -> None:
        _wait_until(lambda: not self.is_loaded)

    def abort(self) -> None:
        pids = self.facts
        self.ask(signal.SIGQUIT)
        deadline = time.monotonic() + DEADLINE_S
        while not self._is_free():
            if time.monotonic() > deadline:
                for pid in (pids.get("supervisor"), pids.get("pid")):
                    with suppress(ProcessLookupError, TypeError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _is_free(self) -> bool:
        """Whether the supervisor, which holds this lock all its life, has ended."""
        with (self.folder / "alive").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True


class _Launchctl:
    """One call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._knobs = _read_json(folder / "knobs.json", _KNOBS)

    def run(self, arguments: list[str]) -> None:
        with (self._folder / "calls").open("a") as file:
            file.write(json.dumps(arguments) + "\n")
        verb = arguments[0].replace("-", "_") if arguments else ""
        call = getattr(self, f"call_{verb}", None)
        if call is None:
            _fail(64, "Unrecognized subcommand: " + verb)
        call(*arguments[1:])

    def call_bootstrap(self, domain: str, path: str) -> None:
        self._require_domain(domain, "Bootstrap failed")
        if code := self._refusal(domain, Path(path)):
            _fail(code, f"Bootstrap failed: {code}: {_TEXTS[code]}")
        content = Path(path).read_bytes()
        job = self._job(domain, plistlib.loads(content)["Label"])
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        (job.folder / "job.plist").write_bytes(content)
        (job.folder / "path").write_text(path)
        supervisor = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(self._folder), "--supervise", str(job.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / "supervisor.log").open("a"),
            start_new_session=True,
        )
        _wait_until(lambda: job.is_loaded or supervisor.poll() is not None)

    def _refusal(self, domain: str, path: Path) -> int:
        try:
            entries = plistlib.loads(path.read_bytes())
            label, arguments = entries["Label"], entries["ProgramArguments"]
            mode = path.stat().st_mode
        except (OSError, ValueError, KeyError, TypeError, plistlib.InvalidFileException):
            return 5
        if not isinstance(label, str) or not all(isinstance(each, str) for each in arguments):
            return 5
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            return 5
        if self._disabled(domain).get(label):
            return 5
        if self._job(domain, label).is_loaded:
            return int(self._knobs["loaded_code"])
        sessions = entries.get("LimitLoadToSessionType", "Aqua")
        if {"gui": "Aqua", "user": "Background"}[domain.split("/")[0]] not in sessions:
            return 5
        if self._knobs["num_refusals"]:
            knobs = self._knobs | {"num_refusals": self._knobs["num_refusals"] - 1}
            _write_json(self._folder / "knobs.json", knobs)
            return 5
        return 0

    def call_bootout(self, target: str) -> None:
        job = self._job(*_split(target))
        if not job.is_loaded:
            _fail(3, "Boot-out failed: 3: No such process")
        job.ask(signal.SIGTERM)
        if self._knobs["leaves_draining"]:
            _fail(36, "Boot-out failed: 36: Operation now in progress")
        job.wait_until_gone()

    def call_kickstart(self, target: str) -> None:
        job = self._require_job(target)
        runs = job.facts["runs"]
        if not job.facts["pid"]:
            job.ask(signal.SIGUSR1)
            _wait_until(lambda: job.facts["runs"] > runs)

    def call_enable(self, target: str) -> None:
        self._set_disabled(*_split(target), False)

    def call_disable(self, target: str) -> None:
        self._set_disabled(*_split(target), True)

    def call_print(self, target: str) -> None:
        if target.count("/") == 1:
            self._require_domain(target, "Could not print domain")
            print(f"{target} = {{\n\ttype = user\n}}")
            return
        job = self._require_job(target)
        print(_describe(target, job))

    def call_print_disabled(self, domain: str) -> None:
        self._require_domain(domain, "Could not print disabled services")
        lines = [
            f'\t\t"{label}" => {"disabled" if off else "enabled"}\n'
            for label, off in self._disabled(domain).items()
        ]
        print("\n\tdisabled services = {\n" + "".join(lines) + "\t}\n\n\tlogin item associations = {\n\t}")

    def _require_domain(self, domain: str, words: str) -> None:
        if code := self._knobs["absent"].get(domain):
            _fail(code, f"{words}: {code}: {_TEXTS[code]}")

    def _require_job(self, target: str) -> _Job:
        domain, label = _split(target)
        job = self._job(domain, label)
        if not job.is_loaded:
            kind, _, uid = domain.partition("/")
            _fail(113, f'Bad request.\nCould not find service "{label}" in domain for user {kind}: {uid}')
        return job

    def _job(self, domain: str, label: str) -> _Job:
        return _Job(self._folder / "jobs" / domain.replace("/", "-") / label)

    def _disabled(self, domain: str) -> dict[str, bool]:
        return _read_json(self._folder / "disabled.json", {}).get(domain, {})

    def _set_disabled(self, domain: str, label: str, off: bool) -> None:
        path = self._folder / "disabled.json"
        everywhere = _read_json(path, {})
        everywhere.setdefault(domain, {})[label] = off
        _write_json(path, everywhere)


def _describe(target: str, job: _Job) -> str:
    """As macOS 26 prints it: the job's own fields behind one tab, and blocks that repeat their names."""
    entries, facts = job.plist, job.facts
    kinds = {"Interactive": "interactive (4)", "Background": "background (5)"}
    lines = [
        f"{target} = {{",
        f"\tactive count = {1 if facts['pid'] else 0}",
        f"\tpath = {(job.folder / 'path').read_text()}",
        "\ttype = LaunchAgent",
        f"\tstate = {facts['state']}",
        "",
        f"\tprogram = {entries['ProgramArguments'][0]}",
        "\targuments = {",
        *(f"\t\t{each}" for each in entries["ProgramArguments"]),
        "\t}",
        "",
        f"\tstdout path = {entries.get('StandardOutPath', os.devnull)}",
        f"\tstderr path = {entries.get('StandardErrorPath', os.devnull)}",
        "\tdefault environment = {",
        f"\t\tPATH => {_PATH}",
        "\t}",
        "",
        "\tenvironment = {",
        f"\t\tXPC_SERVICE_NAME => {entries['Label']}",
        "\t}",
        "",
        f"\tdomain = {target.rpartition('/')[0]} [100057]",
        f"\tminimum runtime = {entries.get('ThrottleInterval', 10)}",
        f"\texit timeout = {entries.get('ExitTimeOut', _DEFAULT_EXIT_TIMEOUT_S)}",
        f"\truns = {facts['runs']}",
        *([f"\tpid = {facts['pid']}"] if facts["pid"] else []),
        f"\t{facts['last_exit']}",
        "",
        "\tsemaphores = {",
        "\t\tsuccessful exit => 0",
        "\t}",
        "",
        "\tresource coalition = {",
        "\t\tstate = active",
        "\t\tactive count = 1",
        "\t}",
        "",
        f"\tspawn type = {kinds.get(entries.get('ProcessType'), 'daemon (3)')}",
        f"\tjob state = {'running' if facts['pid'] else 'exited'}",
        "",
        "\tproperties = keepalive | runatload | inferred program",
        "}",
    ]
    return "\n".join(lines)


class _Supervisor:
    """launchd's part for one job, from `bootstrap` to `bootout`."""

    def __init__(self, state: Path, folder: Path) -> None:
        self._knobs = _read_json(state / "knobs.json", _KNOBS)
        self._folder = folder
        self._entries = _Job(folder).plist
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: Counter[int] = Counter()
        self._next_start: float | None = None
        self._started = 0.0
        self._facts: dict[str, Any] = {
            "supervisor": os.getpid(),
            "state": "not running",
            "pid": None,
            "runs": 0,
            "last_exit": "last exit code = (never exited)",
        }

    def run(self) -> None:
        with (self._folder / "alive").open("w") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT):
                signal.signal(number, lambda number, _: self._asked.update([number]))
            if self._entries.get("RunAtLoad") or self._entries.get("KeepAlive"):
                self._spawn()
            self._tell()
            try:
                while self._turn():
                    time.sleep(_POLL_S)
            finally:
                self._kill()
                (self._folder / "facts.json").unlink(missing_ok=True)

    def _turn(self) -> bool:
        """One look at the job and at what was asked; false once there is nothing left to supervise."""
        if self._asked[signal.SIGQUIT] or not _is_alive(self._knobs["owner"]):
            return False
        if self._asked[signal.SIGTERM]:
            self._stop()
            return False
        if self._process and self._process.poll() is not None:
            self._note_exit()
        wanted = self._asked.pop(signal.SIGUSR1, 0)
        due = self._next_start is not None and time.monotonic() >= self._next_start
        if not self._process and (wanted or due):
            self._spawn()
        return True

    def _spawn(self) -> None:
        self._next_start, self._started = None, time.monotonic()
        entries, name = self._entries, self._entries["Label"]
        user = {key: value for key, value in os.environ.items() if key in _USER_VARIABLES}
        launchds = {"PATH": _PATH, "XPC_SERVICE_NAME": name, "HOME": self._knobs["home"]}
        env = launchds | user | entries.get("EnvironmentVariables", {})
        soft = entries.get("SoftResourceLimits", {}).get("NumberOfFiles", 256)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._facts["runs"] += 1
        try:
            with (
                _appending(entries, "StandardOutPath") as out,
                _appending(entries, "StandardErrorPath") as err,
            ):
                self._process = subprocess.Popen(
                    entries["ProgramArguments"],
                    cwd="/",
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard)),
                )
        except OSError:
            self._end("last exit code = 78: EX_CONFIG", failed=True, crashed=False)
            return
        self._facts |= {"state": "running", "pid": self._process.pid}
        self._tell()

    def _note_exit(self) -> None:
        assert self._process
        code = self._process.returncode
        self._kill()
        if code < 0:
            last_exit = f"last terminating signal = {signal.strsignal(-code)}: {-code}"
        else:
            last_exit = f"last exit code = {code}"
        self._end(last_exit, failed=code != 0, crashed=code < 0 and -code != signal.SIGTERM)

    def _end(self, last_exit: str, *, failed: bool, crashed: bool) -> None:
        self._process = None
        self._facts |= {"state": "not running", "pid": None, "last_exit": last_exit}
        keep = self._entries.get("KeepAlive", False)
        if isinstance(keep, dict):
            keep = keep.get("SuccessfulExit") == (not failed) or (crashed and keep.get("Crashed"))
        if keep:
            pause_s = self._entries.get("ThrottleInterval", 10) * _THROTTLE_SCALE
            self._next_start = self._started + pause_s
            self._facts["state"] = "spawn scheduled"
        self._tell()

    def _stop(self) -> None:
        """SIGTERM, and SIGKILL after ExitTimeOut."""
        if not self._process:
            return
        self._facts["state"] = "draining"
        self._tell()
        timeout_s = self._entries.get("ExitTimeOut", _DEFAULT_EXIT_TIMEOUT_S)
        deadline = time.monotonic() + timeout_s * self._knobs["exit_timeout_scale"]
        self._process.terminate()
        while self._process.poll() is None and not self._asked[signal.SIGQUIT]:
            if timeout_s and time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._kill()

    def _kill(self) -> None:
        if self._process:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _tell(self) -> None:
        _write_json(self._folder / "facts.json", self._facts)


@contextmanager
def _appending(entries: dict[str, Any], key: str) -> Iterator[Any]:
    with Path(entries.get(key, os.devnull)).open("ab") as file:
        yield file


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _split(target: str) -> tuple[str, str]:
    domain, _, label = target.rpartition("/")
    return domain, label


def _fail(code: int, text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(code)


def _wait_until(holds: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            _fail(1, "the fake launchd does not answer")
        time.sleep(_POLL_S)


def _read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value))
    part.replace(path)


if __name__ == "__main__":
    if sys.argv[2:3] == ["--supervise"]:
        _Supervisor(Path(sys.argv[1]), Path(sys.argv[3])).run()
    else:
        _Launchctl(Path(sys.argv[1])).run(sys.argv[2:])
