"""The user's venv: a link at a fixed path to one of several versions, each a folder with a stamp.

    ~/.venv-vllm-metal -> .venv-vllm-metal.d/0.2.0-5f2c81d0-1
    ~/.venv-vllm-metal.d/0.1.0-9a04c7e3-1    goes once nothing runs from it

A venv cannot be moved, so each is made where it stays, and the link moves. What has no stamp is half made.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import vllm_metal
from vllm_metal.errors import SetupError
from vllm_metal.service import package, whole_file

_STAMP = "vllm-metal.json"
_VERSION = re.compile(r".+-[0-9a-f]{8}-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a finished version was made from. Paths are as they were called: links outlive upgrades."""

    version: str
    package_sha256: str
    lock_sha256: str
    python_version: str
    python: str
    launcher: str

    def write(self, folder: Path) -> None:
        whole_file.write(folder / _STAMP, f"{json.dumps(asdict(self), indent=2)}\n".encode())


def read_stamp(folder: Path) -> Stamp | None:
    """The stamp of a version, or of the one that a link leads to; None where there is none of ours."""
    try:
        fields = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        return Stamp(**fields) if all(isinstance(each, str) for each in fields.values()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def own_stamp() -> Stamp | None:
    """That of the version which this process runs from."""
    return read_stamp(Path(sys.prefix))


def is_current(stamp: Stamp) -> bool:
    """Whether what runs now would make the same: its code, lock and Python are those of the stamp."""
    return (
        stamp.package_sha256 == package.sha256()
        and stamp.python_version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]
        and Path(stamp.python).exists()
    )


def versions_dir(venv: Path) -> Path:
    return venv.with_name(f"{venv.name}.d")


def require_ours(venv: Path) -> None:
    """Raises SetupError if something lies at `venv` that is not a link of ours."""
    if os.path.lexists(venv) and not _is_ours(venv):
        raise SetupError(
            f"`{venv}` was not made by `metal setup` and is left alone",
            hint="make another by `metal setup --venv PATH` and set `VLLM_METAL_VENV` to PATH",
        )


def _is_ours(venv: Path) -> bool:
    return venv.is_symlink() and venv.readlink().parent == Path(versions_dir(venv).name)


def new_version(venv: Path) -> Path:
    """A path for the next version; nothing is there yet."""
    name = f"{vllm_metal.__version__}-{package.sha256()[:8]}"
    number = 1
    while (path := versions_dir(venv) / f"{name}-{number}").exists():
        number += 1
    return path


def switch(venv: Path, version: Path) -> None:
    """Let the link lead to `version`, in one step."""
    link = versions_dir(venv) / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(versions_dir(venv).name, version.name))
    link.replace(venv)


def hold(version: Path) -> None:
    """Keep `version` from being removed until this process, or the program it becomes, has ended.

    Raises FileNotFoundError if it has been.
    """
    path = version / _STAMP
    stamp = os.open(path, os.O_RDONLY)
    fcntl.flock(stamp, fcntl.LOCK_SH)
    if not _is_at(stamp, path):
        os.close(stamp)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    os.set_inheritable(stamp, True)


def prune(venv: Path) -> None:
    """Remove the versions that are half made, or left with nothing that runs from them; needs `exclusive`."""
    current = venv.resolve()
    for version in versions_dir(venv).resolve().iterdir():
        if _VERSION.fullmatch(version.name) and version != current and _invalidate(version):
            shutil.rmtree(version, ignore_errors=True)


def _invalidate(version: Path) -> bool:
    """Take the stamp away, so that nobody starts from `version` any more; false if something runs from it."""
    path = version / _STAMP
    try:
        # One that is half made or damaged has none.
        with suppress(FileNotFoundError, IsADirectoryError), path.open() as stamp:
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    return True


def contents(venv: Path) -> list[Path]:
    """The link, the versions and what holds them together, as far as they are there. Raises SetupError."""
    require_ours(venv)
    folder = versions_dir(venv)
    # Where the user chose the venv's name, the folder may have been somebody's before.
    own = [
        path for path in folder.glob("*") if _VERSION.fullmatch(path.name) or path.name in ("lock", "link")
    ]
    return [venv, *own] if os.path.lexists(venv) else own


def remove(venv: Path) -> None:
    """Remove all versions and the link; needs `exclusive`.

    Raises OSError, and SetupError if something runs from a version, which stays.
    """
    links = [path for path in contents(venv) if path.is_symlink() or path.is_file()]
    versions = [path for path in contents(venv) if path not in links]
    in_use = [version for version in versions if not _invalidate(version)]
    for version in versions:
        if version not in in_use:
            shutil.rmtree(version)
    if in_use:
        raise SetupError(
            f"a `metal` still runs from `{in_use[0]}`", hint="end it, then run `metal uninstall` again"
        )
    for link in links:
        link.unlink()
    with suppress(OSError):
        versions_dir(venv).rmdir()


@contextmanager
def exclusive(venv: Path, on_busy: Callable[[], None]) -> Iterator[int]:
    """Let one process at a time change `venv`; yields a descriptor that locks for whoever inherits it.

    `on_busy` is called before this waits for another process.
    """
    folder = versions_dir(venv)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_busy()
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Another may have removed it all meanwhile.
            if _is_at(lock.fileno(), folder / "lock"):
                yield lock.fileno()
                return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
