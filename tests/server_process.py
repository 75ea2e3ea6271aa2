"""A real `metal serve` in a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

METAL = str(Path(sys.executable).with_name("metal"))
START_TIMEOUT_S = 60


class ServerProcess:
    """Entering it waits until the port is open, `ready` for the model. All that it wrote is in `log`."""

    def __init__(self, *args: str, env: Mapping[str, str], cwd: Path | None = None) -> None:
        self._args = args
        self._env = {**os.environ, **env}
        self._cwd = cwd
        self._lines: list[str] = []
        self._listening = threading.Event()
        self.url = ""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [METAL, "serve", *self._args, "--port", "0"],
            env=self._env,
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._listening.wait(START_TIMEOUT_S) or not self.url:
            self.process.kill()
            raise RuntimeError(f"the server did not start:\n{self.log}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def ready(self) -> Self:
        """Requests wait for the model, so one that is answered means that it is there."""
        status, body = self.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
        assert status == 200, (body, self.log)
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        return self._ask(urllib.request.Request(self.url + path, headers=dict(headers or {})))

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self._ask(urllib.request.Request(self.url + path, data=data, headers=sent))

    def chat(self, text: str, **fields: Any) -> str:
        """The answer to one user message, greedy unless `fields` say otherwise."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields
        status, answer = self.post("/v1/chat/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]

    def _ask(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, json.load(exc)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if found := re.match(r"listening on (http://\S+)", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()
