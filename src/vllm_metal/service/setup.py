"""Makes the user's venv, or renews it: whole and checked, or not at all."""

from __future__ import annotations

import errno
import platform
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import vllm_metal
from vllm_metal import paths
from vllm_metal.errors import SetupError
from vllm_metal.service import executable, package, requirements
from vllm_metal.service import venv as venvs
from vllm_metal.service.requirements import Lock

_NUM_LINES_SHOWN = 4
_LOCKED = ("--require-hashes", "--only-binary", ":all:", "--no-deps", "--requirement")
# As both pip and uv write it; small ones pass unseen.
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)(?:(?:-[^-\s]+){3}\.whl)? \((\d+(?:\.\d+)? ?[MG]i?B)\)")
_NO_NETWORK = re.compile(
    r"name resolution|nodename nor servname|network is unreachable|newconnectionerror|max retries exceeded"
    r"|timed out|connection (refused|reset|aborted)|dns error|error sending request",
    re.IGNORECASE,
)
_DISK_FULL = re.compile(r"no space left on device|dis[ck] quota exceeded", re.IGNORECASE)
_DISK_FULL_HINT = "free some space and run `metal setup` again"
# Whether it is fit for this system, nothing but loading it can show.
_LOADS = "import mlx.core"


def ensure(venv: Path, on_stage: Callable[[str], None], *, force: bool = False) -> Path:
    """The version that `venv` leads to; made if it is absent, stale, or by `force`. Raises SetupError."""
    lock = requirements.lock()
    venvs.require_ours(venv)
    if not force and _is_ready(venv):
        return venv.resolve()
    try:
        with venvs.exclusive(venv, lambda: on_stage("waiting for another `metal setup`")) as descriptor:
            # Another may have made it meanwhile.
            if force or not _is_ready(venv):
                venvs.prune(venv)
                version = venvs.new_version(venv)
                try:
                    _make(version, lock, on_stage, descriptor)
                    venvs.switch(venv, version)
                except BaseException:
                    shutil.rmtree(version, ignore_errors=True)
                    raise
            return venv.resolve()
    except OSError as exc:
        is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        elsewhere = f"see to `{venv.parent}`, or set `VLLM_METAL_VENV` to another path"
        raise SetupError(
            f"cannot make `{venv}`: {exc.strerror or exc}",
            hint=_DISK_FULL_HINT if is_full else elsewhere,
            retryable=is_full,
        ) from exc


def prune(venv: Path) -> None:
    """Remove versions that nothing runs from any more, unless another process is at work on `venv`."""

    def give_up() -> None:
        raise BlockingIOError

    with suppress(OSError), venvs.exclusive(venv, give_up):
        venvs.prune(venv)


def _is_ready(venv: Path) -> bool:
    stamp = venvs.read_stamp(venv)
    return stamp is not None and venvs.is_current(stamp)


def _make(version: Path, lock: Lock, on_stage: Callable[[str], None], descriptor: int) -> None:
    def run(doing: str, *command: str | Path) -> None:
        _run(doing, command, on_stage, descriptor)

    python = version / "bin/python"
    on_stage(f"creating `{version}`")
    # Not by uv, which would follow the links of Python's path.
    without_pip = ["--without-pip"] if shutil.which("uv") else []
    run("create the venv", sys.executable, "-I", "-m", "venv", "--prompt", paths.APP, *without_pip, version)
    on_stage(f"installing {lock.num_packages} packages")
    run("install the packages", *_pip("install", python), *_LOCKED, lock.path)
    package.install(version, lock.requirements)
    on_stage("checking")
    run("confirm the packages", *_pip("check", python))
    run("load MLX", python, "-I", "-c", _LOADS)
    run("start the new `metal`", python, version / "bin/metal", "--version")
    venvs.Stamp(
        version=vllm_metal.__version__,
        package_sha256=package.sha256(),
        lock_sha256=lock.sha256,
        python_version=platform.python_version(),
        python=str(_base_python(python)),
        launcher=str(executable.find()),
    ).write(version)


def _pip(verb: str, python: Path) -> Sequence[str | Path]:
    if uv := shutil.which("uv"):
        return uv, "pip", verb, "--python", python
    return python, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", verb


def _base_python(link: Path) -> Path:
    """What a venv was made from, not followed further: Homebrew's links outlive upgrades."""
    target = link.readlink()
    return target if target.is_absolute() else _base_python(link.parent / target)


def _run(doing: str, command: Sequence[str | Path], on_stage: Callable[[str], None], descriptor: int) -> None:
    """Raises SetupError with the last lines of what the command wrote."""
    lines: deque[str] = deque(maxlen=200)
    with subprocess.Popen(
        command,
        # A project's folder may hold settings of its own for uv.
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        # If this process is killed, the lock stays until the command has ended too.
        pass_fds=[descriptor],
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.strip())
                if download := _DOWNLOAD.match(line):
                    on_stage("downloading {} ({})".format(*download.groups()))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _failure(doing, process.returncode, [line for line in lines if line])


def _failure(doing: str, code: int, lines: list[str]) -> SetupError:
    shown = lines[-_NUM_LINES_SHOWN:] or [f"exit code {code}"]
    message = "\n  ".join([f"cannot {doing}:", *shown])
    output = "\n".join(lines)
    if _NO_NETWORK.search(output):
        return SetupError(message, hint="check the network and run `metal setup` again", retryable=True)
    if _DISK_FULL.search(output):
        return SetupError(message, hint=_DISK_FULL_HINT, retryable=True)
    return SetupError(message, hint="`metal setup` begins anew")
