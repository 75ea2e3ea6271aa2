"""The service's verbs: install, uninstall, start, stop, restart. Each may be said again at any point."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_metal.errors import ServiceError
from vllm_metal.service import executable, launchctl, launchd, plist, probe
from vllm_metal.service.launchctl import Job
from vllm_metal.settings import EXIT_TIMEOUT_S

_POLL_S = 0.2
_BOOTSTRAP_PAUSES_S = (0.5, 1.0, 2.0)
_GONE_TIMEOUT_S = EXIT_TIMEOUT_S + 5
# More than `ThrottleInterval`, which launchd may wait before it starts the service again.
_START_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where launchd holds the service."""

    domain: str
    job: Job

    @property
    def target(self) -> str:
        return f"{self.domain}/{launchd.LABEL}"


def find() -> Loaded | None:
    """The service as launchd holds it, in whichever domain."""
    for domain in launchctl.domains():
        if job := launchctl.find_job(f"{domain}/{launchd.LABEL}"):
            return Loaded(domain, job)
    return None


def entries(loaded: Loaded | None) -> dict[str, Any]:
    """What the service's plist says: launchd's, which may lie in Homebrew's keg, or else the user's."""
    path = loaded.job.path if loaded else None
    return plist.read(Path(path) if path else plist.file())


def home_domain() -> str:
    """The domain for a service that is not loaded: the session at the screen if there is one."""
    gui, user = launchctl.domains()
    return gui if launchctl.has_domain(gui) else user


def install() -> str:
    """Write the plist and have launchd run it; returns what was done, in words. Raises ServiceError."""
    _refuse_root()
    if plist.is_from_brew(entries(find())):
        raise ServiceError(
            "the service is managed by Homebrew",
            hint="use `brew services restart vllm-metal`, or run `metal service uninstall` before this",
        )
    return _run(plist.render(executable.find()))


def start() -> str:
    """Have launchd run what is installed; returns what was done, in words. Raises ServiceError."""
    return _run(_installed())


def restart() -> str:
    """Stop the service as SIGTERM does, and start it by the newest plist. Raises ServiceError."""
    return _run(_installed(), afresh=True)


def stop() -> str:
    """Let the service finish its requests and end, until `start` or the next login. Raises ServiceError."""
    _refuse_root()
    if (loaded := find()) is None:
        return "the service is not running"
    _unload(loaded)
    launchd.clear_reason()
    return "stopped the service; it starts again at the next login"


def uninstall() -> str:
    """Stop the service and remove all that `install`, or Homebrew, left of it. Raises ServiceError."""
    _refuse_root()
    loaded = find()
    if loaded:
        _unload(loaded)
    installed = plist.file().exists()
    plist.file().unlink(missing_ok=True)
    launchd.clear_reason()
    _remove_logs()
    return "removed the service" if loaded or installed else "the service is not installed"


def _remove_logs() -> None:
    folder = launchd.log_file().parent
    with suppress(OSError):
        for each in (launchd.stdio_file(), *folder.glob(f"{launchd.log_file().name}*")):
            each.unlink(missing_ok=True)
        folder.rmdir()


def _installed() -> bytes:
    """What the plist should say: its own words where Homebrew wrote it."""
    _refuse_root()
    try:
        content = plist.file().read_bytes()
    except FileNotFoundError:
        raise ServiceError("the service is not installed", hint="run `metal service install`") from None
    return content if plist.is_from_brew(plist.read(plist.file())) else plist.render(executable.find())


def _refuse_root() -> None:
    if os.geteuid() == 0 and "SUDO_UID" in os.environ:
        raise ServiceError("the service belongs to a user, not to root", hint="run this without `sudo`")


def _run(content: bytes, *, afresh: bool = False) -> str:
    """Have the service run by a plist of `content`; one that does well is left alone unless `afresh`."""
    loaded = find()
    was_running = loaded is not None and loaded.job.pid is not None
    changed = not plist.is_written(content)
    # Before the plist is replaced: whatever cuts this short, what is loaded is what is written.
    if loaded and (changed or afresh or launchd.read_reason()):
        _unload(loaded)
        loaded = None
    if changed:
        plist.write(content)
    if loaded and was_running:
        return f"the service runs already (pid {loaded.job.pid})"
    # launchd does not start what has nowhere to write.
    launchd.stdio_file().parent.mkdir(parents=True, exist_ok=True)
    launchd.clear_reason()
    if loaded:
        launchctl.kickstart(loaded.target)
    else:
        _bootstrap(home_domain())
    return f"{'restarted' if was_running else 'started'} the service {_await_start()}"


def _unload(loaded: Loaded) -> None:
    code = launchctl.bootout(loaded.target)
    if code not in (0, launchctl.NO_SUCH_PROCESS, launchctl.IN_PROGRESS, launchctl.NO_SUCH_SERVICE):
        raise ServiceError(f"launchd did not stop the service: {launchctl.meaning(code)}")
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while launchctl.find_job(loaded.target):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"the service has not ended within {_GONE_TIMEOUT_S} s",
                hint="`metal service status` tells its pid, and `kill -9` ends it",
            )
        time.sleep(_POLL_S)


def _bootstrap(domain: str) -> None:
    target = f"{domain}/{launchd.LABEL}"
    # A label once disabled stays so, through reinstalling and reboots.
    launchctl.enable(target)
    code = launchctl.bootstrap(domain, plist.file())
    for pause_s in _BOOTSTRAP_PAUSES_S:
        # What has only just ended is refused for a moment.
        if code not in (launchctl.IO_ERROR, launchctl.ALREADY_IN_PROGRESS):
            break
        time.sleep(pause_s)
        code = launchctl.bootstrap(domain, plist.file())
    if code and launchctl.find_job(target) is None:
        raise ServiceError(
            f"launchd did not take the service: {launchctl.meaning(code)}",
            hint="see whether `metal` is allowed in System Settings, General, Login Items & Extensions",
        )


def _await_start() -> str:
    """The pid, in words, once the server answers or has had its time. Raises ServiceError if it died."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        loaded = find()
        pid = loaded.job.pid if loaded else None
        # With or without a model: that may take its time.
        is_up = pid is not None and probe.ask().pid == pid
        if reason := launchd.read_reason():
            raise ServiceError(f"the service cannot start: {reason.message}", hint=reason.hint)
        if is_up:
            return f"(pid {pid})"
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if pid is None:
        raise ServiceError(
            "launchd took the service but does not keep it running",
            hint="`metal service status` and `metal service logs` tell why",
        )
    return f"(pid {pid}), which does not answer yet: `metal service status` tells when it does"
