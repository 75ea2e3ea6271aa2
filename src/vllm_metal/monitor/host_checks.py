"""Checks of the machine and of how it is set up."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping

from vllm_metal import config
from vllm_metal.errors import ConfigError
from vllm_metal.hub.disk import format_bytes
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings
from vllm_metal.service import plist

_NOT_A_MAC = "not a Mac"
_LEAST_MACOS = 14
# The first to let Metal keep memory wired.
_WIRED_MACOS = 15
_LOW_DISK_BYTES = 10 * 10**9
_FULL_DISK_BYTES = 10**9
# Memory that macOS itself needs is roughly the rest.
_MOST_WIRED_RATIO = 0.95
_MUCH_SWAP_RATIO = 0.25


def python(surroundings: Surroundings) -> Iterator[Finding]:
    """Rosetta is the most frequent fault: MLX then has no GPU, or is not to be had."""
    host, subject = surroundings.host, "Python"
    version = platform.python_version()
    if not host.is_mac:
        yield Finding("skipped", subject, f"{version}, {_NOT_A_MAC}")
    elif not host.is_apple_silicon:
        yield Finding(
            "problem",
            subject,
            f"{version} on {host.chip or 'a chip'}, which is not Apple Silicon",
            why="MLX runs on the GPUs of Apple Silicon only",
            hint="use a Mac with an M1 or later",
        )
    elif host.is_translated:
        yield Finding(
            "problem",
            subject,
            f"{version} is an Intel program that Rosetta translates",
            why="MLX needs a native Python: a translated one has no Metal GPU",
            hint="install Homebrew in `/opt/homebrew` and vllm-metal with it, from a terminal that is not "
            "opened with Rosetta: there `arch` prints `arm64`",
        )
    else:
        yield Finding("ok", subject, f"{version}, native arm64")


def macos(surroundings: Surroundings) -> Iterator[Finding]:
    host, subject = surroundings.host, "macOS"
    if not host.is_mac:
        yield Finding("skipped", subject, _NOT_A_MAC)
        return
    if host.macos_version is None:
        yield Finding(
            "warning",
            subject,
            "neither `sw_vers` nor `sysctl` tells the version",
            why=f"MLX needs macOS {_LEAST_MACOS} or later",
            hint="see `sw_vers -productVersion`",
        )
        return
    version = ".".join(map(str, host.macos_version))
    if host.macos_version < (_LEAST_MACOS,):
        yield Finding(
            "problem",
            subject,
            f"{version} is too old",
            why=f"MLX needs macOS {_LEAST_MACOS} or later",
            hint="update macOS in System Settings, General, Software Update",
        )
    elif host.macos_version < (_WIRED_MACOS,):
        yield Finding(
            "warning",
            subject,
            f"{version} cannot keep a model's memory wired",
            why="large models slow down when macOS moves their weights out of memory",
            hint=f"update to macOS {_WIRED_MACOS} or later",
        )
    else:
        yield Finding("ok", subject, version)


def configuration(surroundings: Surroundings) -> Iterator[Finding]:
    error, subject = surroundings.config_error, "configuration"
    if error is None:
        yield Finding("ok", subject, "valid")
    else:
        yield _config_problem(subject, error)


def device(surroundings: Surroundings) -> Iterator[Finding]:
    """Whether a setting or variable keeps models off the GPU, here or in the service."""
    yield _device(surroundings, "device", None if surroundings.config_error else surroundings.config)
    if not plist.file().exists():
        return
    variables = plist.read(plist.file()).get("EnvironmentVariables")
    environ = (
        {name: str(value) for name, value in variables.items()} if isinstance(variables, Mapping) else {}
    )
    try:
        yield _device(surroundings, "service's device", config.load(environ=environ))
    except ConfigError as exc:
        yield _config_problem("service's device", exc)


def _device(surroundings: Surroundings, subject: str, loaded: config.Config | None) -> Finding:
    if loaded is None:
        return Finding("skipped", subject, "the configuration is not valid")
    if loaded.engine.device != "cpu":
        return Finding("ok", subject, f"`{loaded.engine.device}`")
    origin = loaded.origins["engine.device"].text
    return Finding(
        "problem" if surroundings.host.is_mac else "warning",
        subject,
        f"models are kept on the CPU by {origin}",
        why="the GPU stays idle, and answers come many times slower",
        hint=f"take it out of `{plist.file()}`, and restart the service"
        if subject.startswith("service") and origin.startswith("environment")
        else "unset it, and restart the server",
    )


def memory(surroundings: Surroundings) -> Iterator[Finding]:
    host = surroundings.host
    available = f"{format_bytes(host.memory_available_bytes)} of {format_bytes(host.memory_bytes)} available"
    hint = "close programs, take a smaller or more quantized model, or lower `engine.gpu_memory_utilization`"
    if host.pressure in (None, "normal"):
        yield Finding("ok", "memory", available + (", no pressure" if host.pressure else ""))
    else:
        yield Finding(
            "problem" if host.pressure == "critical" else "warning",
            "memory",
            f"{host.pressure} memory pressure, {available}",
            why="macOS compresses and swaps memory, and each step waits for it",
            hint=hint,
        )
    if host.swap_used_bytes is None:
        yield Finding("skipped", "swap", "nothing tells how much is used")
    elif host.swap_used_bytes > _MUCH_SWAP_RATIO * host.memory_bytes:
        yield Finding(
            "warning",
            "swap",
            f"{format_bytes(host.swap_used_bytes)} of memory are swapped out to disk",
            why="weights that are read back from the disk make steps many times slower",
            hint=hint,
        )
    else:
        yield Finding("ok", "swap", f"{format_bytes(host.swap_used_bytes)} used")


def wired_limit(surroundings: Surroundings) -> Iterator[Finding]:
    host, subject, name = surroundings.host, "wired limit", "iogpu.wired_limit_mb"
    limit_bytes = host.wired_limit_bytes
    if limit_bytes is None:
        yield Finding("skipped", subject, f"macOS has no `{name}` here" if host.is_mac else _NOT_A_MAC)
    elif limit_bytes == 0:
        yield Finding("ok", subject, "macOS decides")
    elif limit_bytes > _MOST_WIRED_RATIO * host.memory_bytes:
        yield Finding(
            "warning",
            subject,
            f"`{name}` lets the GPU have {format_bytes(limit_bytes)} of {format_bytes(host.memory_bytes)}",
            why="what is left is too little for macOS, which may then halt",
            hint=f"`sudo sysctl {name}=0` gives the choice back to macOS",
        )
    else:
        yield Finding("ok", subject, f"{format_bytes(limit_bytes)}, until the next restart of the Mac")


def disk(surroundings: Surroundings) -> Iterator[Finding]:
    folder = surroundings.config.models.store.absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free_bytes = shutil.disk_usage(existing).free
    except OSError as exc:
        yield Finding(
            "warning",
            "disk",
            f"cannot look at `{folder}`: {exc.strerror}",
            why="models are kept there",
            hint=f"see `ls -ld {folder}`, or set `models.dir`",
        )
        return
    message = f"{format_bytes(free_bytes)} free for `{folder}`"
    if free_bytes < _LOW_DISK_BYTES:
        yield Finding(
            "problem" if free_bytes < _FULL_DISK_BYTES else "warning",
            "disk",
            message,
            why="models take gigabytes, and macOS swaps to this disk",
            hint="free some space, or name another disk with `metal config set models.dir`",
        )
    else:
        yield Finding("ok", "disk", message)


def _config_problem(subject: str, error: ConfigError) -> Finding:
    return Finding(
        "problem", subject, error.message, why="the server does not start with it", hint=error.hint
    )
