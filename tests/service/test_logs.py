"""`metal service logs`: the end of the log, past its rotation, and the last words of what could not log."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from mac_user import User


@pytest.fixture
def logged(user: User) -> User:
    user.log.parent.mkdir(parents=True)
    user.log.write_text("".join(f"line {number}\n" for number in range(60)))
    return user


def test_the_last_lines_are_shown(logged: User):
    assert logged.service("logs").stdout.splitlines() == [f"line {number}" for number in range(10, 60)]
    assert logged.service("logs", "-n", "1").stdout == "line 59\n"
    assert logged.service("logs", "-n", "0").stdout == ""
    assert logged.service("logs", "-n", "many").returncode == 2


def test_no_log_yet(user: User):
    done = user.service("logs")
    assert done.returncode == 1
    assert f"there is no log `{user.log}` yet" in done.stderr


def test_a_service_that_makes_its_venv_tells_how_far_it_is(user: User):
    user.stdio.parent.mkdir(parents=True)
    user.stdio.write_text("checking\n")
    done = user.service("logs")
    assert (done.returncode, done.stdout) == (0, "checking\n")
    assert f"`{user.stdio}`" in done.stderr


def test_a_log_that_cannot_be_read(user: User):
    user.log.mkdir(parents=True)
    for follow in ([], ["--follow"]):
        done = user.service("logs", *follow)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: cannot read `{user.log}`: Is a directory\n\nhint: ")


def test_the_last_words_of_a_daemon_that_died_before_it_could_log(logged: User):
    logged.stdio.write_text("ModuleNotFoundError\n")
    os.utime(logged.log, (1, 1))
    done = logged.service("logs", "-n", "1")
    assert done.stdout.splitlines() == ["ModuleNotFoundError", "line 59"]
    assert f"`{logged.stdio}`" in done.stderr
    os.utime(logged.stdio, (0, 0))
    assert logged.service("logs", "-n", "1").stdout == "line 59\n"


def test_a_log_is_followed_past_its_rotation(logged: User):
    with subprocess.Popen(
        [logged.metal, "service", "logs", "-f", "-n", "1"],
        env=logged.env,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "line 59\n"
            with logged.log.open("a") as log:
                log.write("grown\n")
            assert process.stdout.readline() == "grown\n"
            with logged.log.open("a") as log:
                log.write("last of the old\n")
            logged.log.rename(logged.log.with_name("metal.log.1"))
            logged.log.write_text("first of the new\n")
            assert process.stdout.readline() == "last of the old\n"
            assert process.stdout.readline() == "first of the new\n"
            os.truncate(logged.log, 0)
            with logged.log.open("a") as log:
                log.write("anew\n")
            assert process.stdout.readline() == "anew\n"
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
        finally:
            process.kill()
