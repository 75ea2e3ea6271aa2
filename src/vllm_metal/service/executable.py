"""Which `metal` the service runs: one that upgrades leave in its place."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from vllm_metal.service import venv

_KEG = re.compile(r"(?P<prefix>.*)/Cellar/(?P<formula>[^/]+)/[^/]+/.*")


def find() -> Path:
    """The running `metal`, or what made its venv, by the path that leads to the next version too."""
    metal = _launcher() or _running()
    if keg := _KEG.fullmatch(str(metal.resolve())):
        return Path(keg["prefix"], "opt", keg["formula"], "bin", "metal")
    return metal


def _launcher() -> Path | None:
    stamp = venv.own_stamp()
    return Path(stamp.launcher) if stamp else None


def _running() -> Path:
    called = sys.argv[0]
    if Path(called).name != "metal":
        called = str(Path(sys.executable).with_name("metal"))
    return Path(shutil.which(called) or called).absolute()
