from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from vllm_metal.monitor.command import Finished, run


def test_a_program_runs_in_no_language_and_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("SYSTEM_VERSION_COMPAT", "1")
    code = (
        "import os, sys; print(os.environ['LC_ALL'], os.environ['SYSTEM_VERSION_COMPAT'], sys.stdin.read()); "
        "sys.stderr.write('hm'); sys.exit(3)"
    )
    assert run(sys.executable, "-c", code) == Finished(3, "C 0 \n", "hm")


def test_system_folders_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run("sh", "-c", "echo $PATH").stdout.startswith("/nowhere:/usr/bin:")
    assert os.environ["PATH"] == "/nowhere"


def test_a_server_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned, spawn = [], os.posix_spawn

    def record(*arguments: Any, **settings: Any) -> int:
        spawned.append(arguments[0])
        return spawn(*arguments, **settings)

    monkeypatch.setattr(os, "posix_spawn", record)
    assert run("echo", "done").stdout == "done\n"
    assert spawned == [shutil.which("echo")]


def test_a_program_that_is_missing_or_hangs_gives_nothing() -> None:
    assert run("no-such-program") == Finished(None)
    assert run(sys.executable, "-c", "import time; time.sleep(600)", timeout_s=0.2) == Finished(None)


def test_a_program_that_may_not_be_killed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: object) -> None:
        raise PermissionError

    monkeypatch.setattr("subprocess.Popen.kill", refuse)
    assert run("sleep", "0.5", timeout_s=0.01) == Finished(None)


def test_an_interrupt_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    communicate = subprocess.Popen.communicate

    def interrupt(process: subprocess.Popen[bytes], timeout: float) -> None:
        communicate(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("true")


def test_bytes_that_are_no_text_are_survived() -> None:
    assert run("sh", "-c", r"printf '\377ok'").stdout == "\ufffdok"
