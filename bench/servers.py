"""Starts this project's server or mlx_lm.server on a model folder, and stops it."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from vllm_metal.bench.client import StreamingClient, Target
from vllm_metal.bench.load import Prompt
from vllm_metal.bench.record import RequestRecord

OURS, THEIRS = "vllm-metal", "mlx_lm.server"

_COMMANDS = {
    # By import rather than as `metal`, which is there only where the package is installed.
    OURS: ["-c", "from vllm_metal.cli.main import main; main()", "serve", "{model}"],
    THEIRS: ["-m", "mlx_lm", "server", "--model", "{model}", "--log-level", "WARNING"],
}
_STOP_TIMEOUT_S = 30


class ServerFailed(Exception):
    pass


class Server:
    """Entering it waits until the first token of an answer has come. All that it writes goes to `log`."""

    def __init__(
        self, name: str, model: Path, log: Path, arguments: str = "", *, start_timeout_s: float = 300
    ) -> None:
        self.name = name
        self.log = log
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            sys.executable,
            *(part.format(model=model) for part in _COMMANDS[name]),
            *("--port", str(port)),
            *shlex.split(arguments),
        ]
        self._start_timeout_s = start_timeout_s

    def __enter__(self) -> Self:
        # The user's own configuration must not change what is measured.
        environment = {**os.environ, "METAL_CONFIG": os.devnull}
        with self.log.open("a") as log:
            log.write(f"\n$ {shlex.join(self.command)}\n")
            log.flush()
            self._process = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def cpu_s(self) -> float:
        """Processor time that the server has used."""
        process = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while not self._is_listening():
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with {self._process.returncode}; see `{self.log}`")
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"{self.name} did not start within {self._start_timeout_s:g} s")
            time.sleep(0.1)
        record = asyncio.run(self._first_answer(deadline_s - time.monotonic()))
        if record.error is not None:
            raise ServerFailed(f"{self.name}: {record.error}; see `{self.log}`")

    def _is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), 1):
            return True
        return False

    async def _first_answer(self, timeout_s: float) -> RequestRecord:
        record = RequestRecord(max_tokens=1)
        async with StreamingClient(Target(url=self.url)) as client:
            try:
                async with asyncio.timeout(timeout_s):
                    await client.stream(Prompt("", "Hi", 1), record)
                    # While a model loads for longer than a request may wait, the answer is a 503.
                    while record.status == 503:
                        record = RequestRecord(max_tokens=1)
                        await client.stream(Prompt("", "Hi", 1), record)
            except TimeoutError:
                record.error = f"no answer within {self._start_timeout_s:g} s of the start"
        return record

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
