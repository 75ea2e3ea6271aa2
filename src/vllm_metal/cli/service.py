"""`metal service`: the daemon as a launchd agent. Standard library only, as it runs without a venv too."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_metal import config, paths
from vllm_metal.cli import printer
from vllm_metal.errors import ConfigError, MetalError, ServiceError
from vllm_metal.service import agent, executable, launchctl, launchd, log_tail, plist, status
from vllm_metal.service.status import Status
from vllm_metal.settings import SETTINGS

HELP = "Run the server at login and keep it running, through launchd."

#: As service managers say that a service does not run.
_NOT_RUNNING = 3

_VERBS = {
    "install": "Start the server now and at each login.",
    "uninstall": "Stop the server and remove the service with its logs.",
    "start": "Start the installed service.",
    "stop": "Let the server finish its requests and stop it, until the next login.",
    "restart": "Stop and start the service, as after an upgrade.",
    "status": "Tell how the service is; exit with 3 unless it is healthy.",
    "logs": "Print the end of the service's log.",
    "plist": "Print the property list that `install` would write.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", required=True)
    parsers = {name: verbs.add_parser(name, help=words, description=words) for name, words in _VERBS.items()}
    parsers["status"].add_argument("--json", action="store_true", help="Print JSON.")
    logs = parsers["logs"]
    logs.add_argument("-f", "--follow", action="store_true", help="Go on as the log grows.")
    logs.add_argument(
        "-n", "--lines", type=_count, default=50, metavar="N", help="Lines to begin with; else 50."
    )


def run(arguments: argparse.Namespace) -> None:
    verb = arguments.verb
    if verb == "plist":
        printer.out(plist.render(executable.find()).decode(errors="surrogateescape"), end="")
        return
    launchctl.require()
    if verb == "status":
        _status(as_json=arguments.json)
    elif verb == "logs":
        _logs(arguments.lines, follow=arguments.follow)
    else:
        if verb in ("install", "start", "restart"):
            _warn_of_variables()
        try:
            printer.note(getattr(agent, verb)())
        except OSError as exc:
            raise ServiceError(
                f"cannot change `{exc.filename}`: {exc.strerror}", hint=f"see `ls -ld '{exc.filename}'`"
            ) from exc


def _warn_of_variables() -> None:
    ours = {name for each in SETTINGS.values() for name in (each.environment, *each.variables)}
    if given := sorted(os.environ.keys() & {*ours, "METAL_CONFIG", "HF_HOME", "HF_ENDPOINT", "HF_TOKEN"}):
        names = ", ".join(f"`{name}`" for name in given)
        printer.warning(f"launchd does not hand {names} to the service, which reads `{paths.config_file()}`")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of lines")
    return min(int(text), sys.maxsize)


def _status(*, as_json: bool) -> None:
    found = status.read()
    if as_json:
        printer.out(json.dumps(dataclasses.asdict(found) | {"healthy": found.is_healthy}, indent=2))
    else:
        for name, words in _rows(found):
            printer.out(f"{name:<11}{words}")
        if problem := found.problem:
            printer.note()
            printer.error(MetalError(problem[0], hint=problem[1]))
    if not found.is_healthy:
        sys.exit(_NOT_RUNNING)


def _rows(found: Status) -> Iterator[tuple[str, str]]:
    manager = f"by {'Homebrew' if found.managed_by == 'brew' else 'metal'}"
    plist_is = {True: ", plist current", False: ", plist outdated", None: ""}[found.plist_current]
    yield "installed", f"{manager}{plist_is}" if found.installed else "no"
    yield "enabled", "no" if found.disabled else "yes"
    yield "job", f"{found.state or 'loaded'} in {found.domain}" if found.loaded else "not loaded"
    if found.pid:
        yield "pid", str(found.pid)
    if found.process_type:
        yield "runs as", found.process_type
    if found.last_exit:
        yield "last exit", f"{found.last_exit}: {found.last_exit_meaning}"
    yield "health", f"{found.health}{f' at {found.url}' if found.url else ''}"
    yield "version", f"{found.version_running or 'none'} running, {found.version_installed} installed"


def _logs(num_lines: int, *, follow: bool) -> None:
    loaded = agent.find()
    log, stdio = _log_file(), plist.stdio_file(agent.entries(loaded))
    if _has_news(stdio, log, is_running=loaded is not None and loaded.job.pid is not None):
        printer.note(f"what the service wrote to `{stdio}` before it could log:")
        printer.out(log_tail.tail(stdio, num_lines), end="")
        if log.exists():
            printer.note(f"its log `{log}`:")
    elif not follow and not log.exists():
        raise ServiceError(f"there is no log `{log}` yet", hint="`metal service status` tells why")
    for text in log_tail.follow(log, num_lines) if follow else [log_tail.tail(log, num_lines)]:
        printer.out(text, end="")


def _log_file() -> Path:
    # A file that the daemon cannot read either sends it to its usual log.
    with suppress(ConfigError):
        if file := config.load(environ={}).log.file:
            return Path(file)
    return launchd.log_file()


def _has_news(stdio: Path, log: Path, *, is_running: bool) -> bool:
    """Whether the service makes its venv, or ended before it could log."""
    if not stdio.exists() or not stdio.stat().st_size:
        return False
    return not log.exists() or (not is_running and log.stat().st_mtime < stdio.stat().st_mtime)
