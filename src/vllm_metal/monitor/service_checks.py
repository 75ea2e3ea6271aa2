"""Checks of what is installed: versions, the venv, the service and what it may read."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from vllm_metal import __version__, paths
from vllm_metal.errors import MetalError, ServiceError
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings
from vllm_metal.service import status
from vllm_metal.service import venv as user_venv


def versions(surroundings: Surroundings) -> Iterator[Finding]:
    found = {name: _version(name) for name in ("mlx", "mlx-lm")}
    named = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    message = f"vllm-metal {__version__}, {named}"
    if None in found.values():
        yield Finding("problem", "versions", message, why="models run through them", hint="run `metal setup`")
    else:
        yield Finding("ok", "versions", message)


def venv(surroundings: Surroundings) -> Iterator[Finding]:
    path = paths.venv()
    stamp = user_venv.read_stamp(path)
    if stamp is None:
        yield Finding("skipped", "venv", f"`metal setup` has made none at `{path}`")
    elif not user_venv.is_current(stamp):
        yield Finding(
            "warning",
            "venv",
            f"`{path}` was made by another version, {stamp.version}, or for a Python that has gone",
            why="the service and `metal` may run different code",
            hint="run `metal setup`",
        )
    else:
        yield Finding("ok", "venv", f"`{path}` is current, with Python {stamp.python_version}")


def service(surroundings: Surroundings) -> Iterator[Finding]:
    try:
        found = status.read()
    except ServiceError as exc:
        yield Finding("skipped", "service", exc.message)
        return
    if not found.installed and not found.loaded:
        yield Finding("skipped", "service", "not installed: `metal service install` has it start at login")
    elif found.process_type and not found.process_type.startswith("interactive"):
        yield Finding(
            "problem",
            "service",
            f"macOS runs it as `{found.process_type}`",
            why="macOS holds such processes back: steps take up to eight times longer",
            hint="run `metal service install` and `metal service restart`",
        )
    elif found.problem:
        message, hint = found.problem
        yield Finding(
            "problem" if found.start_error else "warning",
            "service",
            message,
            why="the service is what serves models when nobody is at the terminal",
            hint=hint,
        )
    else:
        yield Finding("ok", "service", f"runs as `{found.process_type or 'interactive'}`, pid {found.pid}")


def model_folders(surroundings: Surroundings) -> Iterator[Finding]:
    """Asked of the server: macOS may keep from it what the user can read."""
    try:
        folders = surroundings.client.model_folders()
    except MetalError:
        folders = []
    if not folders:
        yield Finding("skipped", "model folders", "no server tells what it can read")
        return
    refused = [folder for folder in folders if not folder["readable"]]
    if not refused:
        yield Finding("ok", "model folders", f"the server can read all {len(folders)}")
        return
    named = ", ".join(f"`{folder['path']}` ({folder['detail']})" for folder in refused)
    yield Finding(
        "problem",
        "model folders",
        f"the server cannot read {named}",
        why="macOS keeps services out of Desktop, Documents, Downloads and other disks",
        hint="move the models, or allow `metal` in System Settings, Privacy & Security, Full Disk Access",
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
