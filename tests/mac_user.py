"""A Mac's user: a home, a `launchctl`, and the `metal service` that she types."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_launchctl import FakeLaunchd
from server_process import METAL
from vllm_metal.service.launchd import LABEL

DEADLINE_S = 90


class User:
    """`launchd` is what her `launchctl` talks to; `home` is empty but for what `config` puts there."""

    def __init__(self, folder: Path, home: Path, launchd: FakeLaunchd) -> None:
        self.launchd = launchd
        self.home = home
        self.metal = Path(METAL)
        self.socket = folder / "socket"
        self.plist = self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self.state = self.home / ".local" / "state" / "vllm-metal"
        self.log = self.state / "log" / "metal.log"
        self.stdio = self.state / "log" / "stdio.log"
        self.config_file = self.home / ".config" / "vllm-metal" / "config.toml"

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "SUDO_UID"}
        return {**kept, "HOME": str(self.home), "PATH": f"{self.launchd.bin}:{kept['PATH']}"}

    def config(self, *, model: Path | str = "/no/such/model", text: str = "") -> None:
        """The daemon listens on a socket of its own, and says that there is no model unless one is given."""
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(
            text or f'[server]\nuds = "{self.socket}"\n\n[models]\ndefault = "{model}"\n'
        )

    def service(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.metal, "service", *arguments],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def does(self, *arguments: str) -> str:
        """What a verb that must succeed said."""
        done = self.service(*arguments)
        assert done.returncode == 0, (done.stderr, self.stdio.exists() and self.stdio.read_text())
        return done.stderr

    def status(self) -> dict[str, Any]:
        done = self.service("status", "--json")
        assert done.returncode == (0 if '"healthy": true' in done.stdout else 3), done.stderr
        return json.loads(done.stdout)

    def status_when(self, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The first status that `holds` is true of."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds(status := self.status()):
            assert time.monotonic() < deadline, status
        return status

    @contextmanager
    def streaming(self, **fields: Any) -> Iterator[Callable[[], bytes]]:
        """A chat under way; what is called reads the rest of the answer."""
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields})
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(self.socket))
            sock.sendall(
                "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            first = sock.recv(1)
            yield lambda: first + b"".join(iter(lambda: sock.recv(65536), b""))
