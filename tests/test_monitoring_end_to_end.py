"""`metal top`, `doctor`, `status` and `/metrics` with a real daemon that serves the real SmolLM2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from doctor_run import DATA, OF_THIS_MACHINE
from fake_mac import FakeMac
from server_process import METAL, ServerProcess
from terminal import on_terminal, plain
from vllm_metal.client import Client

# Each command has faster tests, against recorded and scripted replies.
pytestmark = pytest.mark.slow

NUM_REQUESTS = 3
DEADLINE_S = 120
CORNER = "\x1b[H"
SCREEN = """\
Apple MN Max · N GPU cores · macOS N · read by ioreg
fully loaded: N utilised
GPU
utilised     BAR N
Memory
model        weights N B, KV N B, cache N B
GPU          N B in use, N B allocated
system       N B of N B available, swap N B
pressure     normal
Engine at URL
models       smollmN N B
requests     three running, none waiting
speed        prefill N tok/s, decode N tok/s
step         N, prefix hits N
KV use       BAR N
busy         BAR N
"""


@contextmanager
def load(url: str) -> Iterator[None]:
    """Requests that generate from before the block begins until it ends."""
    started, enough = threading.Semaphore(0), threading.Event()

    def generate() -> None:
        messages, begun = [{"role": "user", "content": "Count to a thousand."}], False
        while not enough.is_set():
            with closing(Client(url).chat(messages, max_tokens=4000, ignore_eos=True)) as deltas:
                for delta in deltas:
                    if delta.text and not begun:
                        begun = True
                        started.release()
                    if enough.is_set():
                        return

    threads = [threading.Thread(target=generate) for _ in range(NUM_REQUESTS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(NUM_REQUESTS):
            assert started.acquire(timeout=DEADLINE_S)
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def settled(screen: str, url: str) -> str:
    """What differs from look to look, made alike."""
    screen = screen.replace(url, "URL").replace("3 running, 0 waiting", "three running, none waiting")
    # Of which macOS alone tells.
    screen = re.sub(r", wired (–|[\d.]+ \w+)", "", screen)
    screen = re.sub(r"[█░]+ +", "BAR ", screen)
    screen = re.sub(r"\d[\d.,]*(?<![.,])|–", "N", screen)
    screen = re.sub(r"\bN [kMGT]B\b", "N B", screen)
    # Where a step takes longer than a look there is no figure, and no unit.
    screen = re.sub(r"\bN( ms|%)", "N", screen)
    return "".join(f"{line.rstrip()}\n" for line in screen.splitlines() if line.strip())


def test_top_shows_the_daemon_at_work(server: ServerProcess, tmp_path: Path) -> None:
    mac = FakeMac(tmp_path / "mac")
    mac.show(ioreg=DATA / "ioreg_m1_max_loaded.txt")
    env = {**os.environ, "PATH": mac.path, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    arguments = ("top", "--url", server.url, "--interval", "2")
    with load(server.url), on_terminal(*arguments, env=env) as terminal:
        terminal.expect("busy ")
        terminal.expect(CORNER)
        # From here on a whole look, on a screen of 24 lines.
        screen = plain(terminal.expect(CORNER))
        terminal.type("\x03")
        assert terminal.exit_code() == 0
    assert len(screen.splitlines()) == 24
    assert all(len(line) == 80 for line in screen.splitlines())
    assert settled(screen, server.url) == SCREEN


def test_a_healthy_daemon(server: ServerProcess, smollm2_path: Path) -> None:
    env = {
        **os.environ,
        "METAL_SERVER_PORT": server.url.rpartition(":")[2],
        "METAL_MODELS_DEFAULT": str(smollm2_path),
    }
    done = subprocess.run(
        [METAL, "doctor", "--json"], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    # Whether this machine has memory left is its own affair.
    assert {"warning", "problem"}.isdisjoint(
        each["level"] for name, each in found.items() if name not in {*OF_THIS_MACHINE, "memory"}
    ), found
    assert found["daemon"]["message"] == f"answers at {server.url.replace('localhost', '127.0.0.1')}, healthy"
    assert "GGUF, Q4_1, 8192 tokens of context" in found["model"]["message"]
    assert found["model folders"]["level"] == "ok"
    assert re.search(r"\d tokens/s; engine busy \d", found["under load"]["message"])


def test_status(server: ServerProcess) -> None:
    with load(server.url):
        done = subprocess.run(
            [METAL, "status", "--url", server.url],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert f"requests  {NUM_REQUESTS} running, 0 waiting\n" in done.stdout
    assert re.search(r"\nsmollm2 +ready +[\d.]+ MB +Q4_1 +[CG]PU +\w+ +8192 +no +never\n$", done.stdout)
