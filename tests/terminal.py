"""`metal` on a pseudo-terminal of 80 columns."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DEADLINE_S = 60
# A terminal is handed down by its device; the child must claim it to get Ctrl-C from it.
_RUN = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from vllm_metal.cli.main import main; main()"
)


class Terminal:
    """The user's side of a pseudo-terminal: types, and waits for what it shows."""

    def __init__(self, process: subprocess.Popen[bytes], device: int) -> None:
        self._process = process
        self._device = device
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.raw = ""

    def type(self, keys: str) -> None:
        os.write(self._device, keys.encode())

    def expect(self, text: str) -> str:
        """Wait for `text`; returns what came before it, and forgets both."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.raw:
            assert self._read(deadline), f"no {text!r} in {self.raw!r}"
        before, _, self.raw = self.raw.partition(text)
        return before

    def prompt(self) -> str:
        """Wait until it asks for input: only then does it switch on bracketed paste."""
        return plain(self.expect("\x1b[?2004h"))

    def is_silent_for(self, seconds: float) -> bool:
        return not self._read(time.monotonic() + seconds)

    def exit_code(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            pass
        return self._process.wait(DEADLINE_S)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._device], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._device, 65536)
        except OSError:  # Linux's end of file: nobody holds the other side.
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>78]", "", text).replace("\r\n", "\n")


@contextmanager
def on_terminal(*arguments: str, env: Mapping[str, str], stdout: int | None = None) -> Iterator[Terminal]:
    """Run `metal` until it or the block ends."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, *arguments],
        stdin=theirs,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
        env=env,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            os.close(ours)
