"""Space on disk: what is free, looked at before the first byte of a download, and what is taken."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from vllm_metal.errors import DownloadError


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise `DownloadError` unless the disk of `folder`, which need not exist yet, has `num_bytes` free."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < num_bytes:
        raise DownloadError(
            f"not enough disk space: {format_bytes(num_bytes)} needed, "
            f"{format_bytes(free_bytes)} free on the disk of `{folder}`",
            hint="free some space, or name another disk: `HF_HOME` for hub models, `models.dir` for others",
        )


def used_bytes(path: Path) -> int:
    """Of a file, or of all files in a folder; what links lead to is elsewhere."""
    inside = () if path.is_symlink() else os.walk(path)
    files = [path, *(Path(folder, name) for folder, _, names in inside for name in names)]
    total = 0
    for file in files:
        with suppress(OSError):
            status = file.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def format_bytes(num_bytes: float) -> str:
    """Decimal units, as disks and download pages count: `98.4 MB`."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} TB"
