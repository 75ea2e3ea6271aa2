"""A machine with a hub cache of its own, where the hub's own client pulls in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The client reads its environment at import, hence a process for each pull.
PULL = """
import json, shutil, signal, sys
from dataclasses import asdict
from pathlib import Path

from vllm_metal.errors import DownloadError, MetalError
from vllm_metal.hub import names, pull, transfer
from vllm_metal.settings import ModelsConfig

transfer._FIRST_PAUSE_S = 0.001
source, models_dir, *options = sys.argv[1:]
options = dict(option.split("=") for option in options)
events = []

def on_progress(progress):
    events.append(asdict(progress))
    if "tell_at" in options and any(file.done_bytes >= int(options["tell_at"]) for file in progress.files):
        print("at", options.pop("tell_at"), flush=True)
    if "fail_after" in options and progress.done_bytes > int(options["fail_after"]):
        raise OSError("the reader has gone")

def interrupt(*_):
    print("interrupted", flush=True)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
if "free" in options:
    usage = shutil.disk_usage("/")._replace(free=int(options["free"]))
    shutil.disk_usage = lambda _: usage
try:
    wanted = names.parse_source(source, ModelsConfig(dir=models_dir))
    model = pull.pull(wanted, models_dir=Path(models_dir), on_progress=on_progress)
    answer = {"name": model.name, "path": str(model.path)}
except (MetalError, OSError, KeyboardInterrupt) as exc:
    answer = {
        "error": type(exc).__name__,
        "message": str(exc),
        "hint": getattr(exc, "hint", None),
        "retryable": getattr(exc, "retryable", None),
    }
print(json.dumps({**answer, "events": events}))
"""


class Machine:
    """Its own hub cache and model folder, and `pull` as a process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cache = home / "huggingface" / "hub"

    def environ(self, endpoint: str, **env: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return {**kept, "HF_HOME": str(self.home / "huggingface"), "HF_ENDPOINT": endpoint, **env}

    def start(self, source: str, endpoint: str, *options: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PULL, source, str(self.home / "models"), *options],
            env=self.environ(endpoint, **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pull(self, source: str, endpoint: str, *options: str, **env: str) -> Mapping[str, Any]:
        stdout, stderr = self.start(source, endpoint, *options, **env).communicate(timeout=60)
        assert stderr == ""
        answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return answer

    def blobs(self, name: str) -> Path:
        return self.cache / f"models--{name.replace('/', '--')}" / "blobs"

    def files(self, name: str) -> dict[str, bytes]:
        (snapshot,) = (self.blobs(name).parent / "snapshots").iterdir()
        return {str(path.relative_to(snapshot)): path.read_bytes() for path in snapshot.rglob("*.*")}
