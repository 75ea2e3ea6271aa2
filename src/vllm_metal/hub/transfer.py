"""Large files over HTTP: several at once, each taken up where it stopped and checked by its SHA-256."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_metal.errors import DownloadError
from vllm_metal.hub.progress import FileProgress

if TYPE_CHECKING:
    from httpx2 import Client, Response

_AT_ONCE = 4
_CHUNK_BYTES = 1 << 20
# Content networks refuse whole answers of more than 50 GB.
_MOST_BYTES_PER_REQUEST = 16_000_000_000
_REPORT_EVERY_S = 0.1
_LOOK_FOR_LOCK_EVERY_S = 0.2
# How often in a row a request may bring nothing, and the pauses between.
_MOST_FAILURES = 5
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_WORTH_ANOTHER_TRY = {408, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`sha256` is in hex; `path` is where the file appears, whole and checked or not at all."""

    name: str
    url: str
    size_bytes: int
    sha256: str
    path: Path

    @property
    def partial(self) -> Path:
        """What is there so far: its own name at every try, for the next one to go on."""
        return self.path.with_name(f"{self.path.name}.incomplete")


def kept_bytes(file: RemoteFile) -> int:
    """What earlier tries brought."""
    for path in (file.path, file.partial):
        with suppress(OSError):
            return min(path.stat().st_size, file.size_bytes)
    return 0


def fetch(
    files: Sequence[RemoteFile],
    client: Client,
    headers: Mapping[str, str],
    report: Callable[[list[FileProgress]], None],
) -> None:
    """Fetch what is not there yet. Processes that fetch the same file share the work.

    `report` is called on this thread with the files that have begun; an exception that it raises ends the
    transfer, and what has come stays. Raises `DownloadError` for a file that is not as it was announced,
    OSError, and the client's exceptions.
    """
    transfers = [_Transfer(file, client, headers) for file in files]
    with ThreadPoolExecutor(_AT_ONCE) as executor:
        running = {executor.submit(transfer.run) for transfer in transfers}
        try:
            while running:
                ended, running = wait(running, _REPORT_EVERY_S, FIRST_EXCEPTION)
                for each in ended:
                    each.result()
                report([transfer.progress() for transfer in transfers if transfer.has_begun])
        finally:
            for transfer in transfers:
                transfer.cancel()


class _Transfer:
    """One file on its way. `run` has a thread of its own; the rest may be called from another."""

    def __init__(self, file: RemoteFile, client: Client, headers: Mapping[str, str]) -> None:
        self.has_begun = False
        self._file = file
        self._client = client
        self._headers = headers
        self._done_bytes = 0
        self._digest = hashlib.sha256()
        self._cancelled = threading.Event()
        self._response: Response | None = None

    def progress(self) -> FileProgress:
        return FileProgress(self._file.name, self._done_bytes, self._file.size_bytes)

    def cancel(self) -> None:
        self._cancelled.set()
        if response := self._response:
            # Wakes a thread that waits for a silent server.
            with suppress(OSError):
                connection = response.extensions["network_stream"].get_extra_info("socket")
                connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        self._check_cancelled()
        self.has_begun = True
        self._file.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._file.path.exists():
            with self._file.partial.open("ab+", buffering=0) as partial:
                self._lock(partial)
                # Whoever held the lock may have completed or discarded what was opened here.
                if _is_at(partial, self._file.partial):
                    self._complete(partial)
        self._done_bytes = self._file.size_bytes

    def _lock(self, partial: FileIO) -> None:
        """Wait until no other process writes here, and show what it does meanwhile."""
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            self._done_bytes = min(os.fstat(partial.fileno()).st_size, self._file.size_bytes)
            self._pause(_LOOK_FOR_LOCK_EVERY_S)

    def _complete(self, partial: FileIO) -> None:
        had_bytes = self._take_up(partial)
        self._receive_rest(partial)
        if self._digest.hexdigest() == self._file.sha256:
            os.fsync(partial.fileno())
            self._file.partial.replace(self._file.path)
        elif had_bytes:
            # What an earlier try left may have been damaged since.
            partial.truncate(0)
            self._complete(partial)
        else:
            self._file.partial.unlink()
            raise DownloadError(
                f"`{self._file.name}` came with another content than announced: its SHA-256 is "
                f"{self._digest.hexdigest()}, not {self._file.sha256}",
                hint="it was discarded; run again, and if that does not help ask whoever runs the hub",
                retryable=True,
            )

    def _take_up(self, partial: FileIO) -> int:
        """How many bytes are there already, which are read for the checksum."""
        self._begin_anew()
        partial.seek(0)
        while chunk := partial.read(_CHUNK_BYTES):
            self._check_cancelled()
            self._count(chunk)
        return self._done_bytes

    def _receive_rest(self, partial: FileIO) -> None:
        from httpx2 import TransportError
        from huggingface_hub.errors import HfHubHTTPError

        num_failures = 0
        while self._done_bytes < self._file.size_bytes:
            self._check_cancelled()
            done_before, asked_pause_s = self._done_bytes, 0.0
            problem: Exception | None = None
            try:
                self._receive(partial)
            except TransportError as exc:
                problem = exc
            except HfHubHTTPError as exc:
                if exc.response.status_code not in _WORTH_ANOTHER_TRY:
                    raise
                problem, asked_pause_s = exc, _seconds(exc.response.headers.get("Retry-After"))
            if self._done_bytes > done_before:
                num_failures = 0
                continue
            num_failures += 1
            if num_failures > _MOST_FAILURES:
                raise problem or DownloadError(
                    f"`{self._file.name}` ends after {done_before} of {self._file.size_bytes} bytes",
                    hint="run again later: what has come is kept",
                    retryable=True,
                )
            own_pause_s = _FIRST_PAUSE_S * 2 ** (num_failures - 1)
            self._pause(min(max(own_pause_s, asked_pause_s), _LONGEST_PAUSE_S))

    def _receive(self, partial: FileIO) -> None:
        """One request, for the rest of the file and never past its end."""
        from huggingface_hub import constants, hf_raise_for_status

        start = self._done_bytes
        end = min(self._file.size_bytes, start + _MOST_BYTES_PER_REQUEST) - 1
        headers = {**self._headers, "Range": f"bytes={start}-{end}", "Accept-Encoding": "identity"}
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with self._client.stream("GET", self._file.url, headers=headers, timeout=timeout_s) as response:
            hf_raise_for_status(response)
            if response.status_code != 206 and start:
                # This server knows no ranges.
                self._begin_anew()
                partial.truncate(0)
            self._response = response
            try:
                for chunk in response.iter_raw():
                    self._check_cancelled()
                    if self._done_bytes + len(chunk) > self._file.size_bytes:
                        self._file.partial.unlink()
                        raise DownloadError(
                            f"`{self._file.name}` is longer than the {self._file.size_bytes} bytes announced",
                            hint="it was discarded; run again",
                            retryable=True,
                        )
                    _write(partial, chunk)
                    self._count(chunk)
            finally:
                self._response = None

    def _begin_anew(self) -> None:
        self._done_bytes = 0
        self._digest = hashlib.sha256()

    def _count(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self._done_bytes += len(chunk)

    def _pause(self, seconds: float) -> None:
        self._cancelled.wait(seconds)
        self._check_cancelled()

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(file: FileIO, chunk: bytes) -> None:
    """All of it: an unbuffered file may take less at once."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


def _seconds(retry_after: str | None) -> float:
    """A `Retry-After` header in seconds; it may be missing, or a date."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
