"""How the service is: its plist, its job, its daemon, and what to do where something is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vllm_metal import __version__
from vllm_metal.service import agent, executable, launchctl, launchd, package, plist, probe
from vllm_metal.service.launchd import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is not known is None; `domain` is where the service is loaded, or would be."""

    managed_by: Literal["metal", "brew"] | None
    installed: bool
    plist_current: bool | None
    disabled: bool
    loaded: bool
    domain: str
    state: str | None
    pid: int | None
    last_exit: str | None
    last_exit_meaning: str | None
    process_type: str | None
    url: str | None
    server_pid: int | None
    health: str
    health_detail: str | None
    version_running: str | None
    version_installed: str
    restart_needed: bool
    start_error: Reason | None

    @property
    def is_healthy(self) -> bool:
        return self.health == "ok" and self.server_pid is not None and self.server_pid == self.pid

    @property
    def problem(self) -> tuple[str, str] | None:
        """The first thing that is wrong, and what to do about it."""
        brew = self.managed_by == "brew"
        restart = "brew services restart vllm-metal" if brew else "metal service restart"
        if not self.installed and not self.loaded:
            return "the service is not installed", "run `metal service install`"
        if self.start_error:
            message = f"the service cannot start: {self.start_error.message}"
            return message, self.start_error.hint or f"mend this, then run `{restart}`"
        if self.disabled and not self.loaded:
            return "the service is disabled", "run `metal service start`"
        if not self.loaded:
            return "the service is stopped", "run `metal service start`"
        if self.pid is None:
            return f"the service does not run: {self.last_exit_meaning}", "see `metal service logs`"
        if self.server_pid not in (self.pid, None):
            return f"another server (pid {self.server_pid}) answers at {self.url}", "stop it"
        if self.health == "unavailable":
            return f"the server has no model: {self.health_detail}", "see `metal service logs -f`"
        if self.health != "ok":
            return (
                f"the service runs but cannot be asked how it is: {self.health_detail}",
                "see `metal service logs`; it may still be starting",
            )
        if self.restart_needed:
            return "the service still runs what was installed before", f"run `{restart}`"
        if self.plist_current is False:
            return "the plist is not what this version would write", "run `metal service install`"
        if self.process_type and not self.process_type.startswith("interactive"):
            return f"macOS runs the service slowly, as `{self.process_type}`", f"run `{restart}`"
        return None


def read() -> Status:
    """Ask launchd and the daemon. Raises ServiceError where there is no launchd."""
    loaded = agent.find()
    job = loaded.job if loaded else launchctl.Job()
    domain = loaded.domain if loaded else agent.home_domain()
    installed = plist.file().exists()
    from_brew = plist.is_from_brew(agent.entries(loaded))
    ours = installed and not from_brew
    answer = probe.ask()
    return Status(
        managed_by="brew" if from_brew else "metal" if installed or loaded else None,
        installed=installed,
        plist_current=plist.is_written(plist.render(executable.find())) if ours else None,
        disabled=launchctl.is_disabled(domain, launchd.LABEL),
        loaded=loaded is not None,
        domain=domain,
        state=job.state,
        pid=job.pid,
        last_exit=job.last_exit,
        last_exit_meaning=exit_meaning(job.last_exit) if loaded else None,
        process_type=job.spawn_type,
        url=answer.url,
        server_pid=answer.pid,
        health=answer.health,
        health_detail=answer.detail,
        version_running=answer.version,
        version_installed=__version__,
        restart_needed=answer.restart_needed or _is_another(answer),
        start_error=launchd.read_reason(),
    )


def _is_another(answer: probe.Answer) -> bool:
    """Whether what answers is not what is installed; a development version changes without its number."""
    return answer.version not in (None, __version__) or answer.package_sha256 not in (None, package.sha256())


def exit_meaning(last_exit: str | None) -> str:
    """What launchd's words for it mean: `1`, `78: EX_CONFIG`, `Terminated: 15` or `JETSAM_REASON_…`."""
    words = last_exit or "(never exited)"
    if words.startswith("JETSAM"):
        return "macOS ended it for want of memory"
    if re.fullmatch(r".+: 9", words):
        return "it was killed: by hand, for want of memory, or as it outstayed its time to stop"
    if signal := re.fullmatch(r"(\D+): \d+", words):
        return f"it was ended by a signal, {signal[1]}"
    code = words.partition(":")[0]
    return _MEANINGS.get(code, f"it ended with exit code {code}")


_MEANINGS = {
    "(never exited)": "it has not ended yet",
    "0": "it ended as it was asked to",
    "1": "it ended with an error that is the user's to mend",
    "3": "it ended with an error of its own",
    "78": "launchd could not start it: its program, or the folder that it writes to, is missing",
}
