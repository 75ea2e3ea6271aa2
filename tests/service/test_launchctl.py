"""What `launchctl` prints, read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.errors import ServiceError
from vllm_metal.service import launchctl
from vllm_metal.service.launchctl import Job, parse_disabled, parse_job
from vllm_metal.service.status import exit_meaning

#: As captured on macOS 26, shortened where nothing is read.
PRINTED = """\
gui/501/org.vllm-metal.serve = {
	active count = 1
	path = /Users/ada/Library/LaunchAgents/org.vllm-metal.serve.plist
	type = LaunchAgent
	state = running

	program = /opt/homebrew/opt/vllm-metal/bin/metal
	arguments = {
		/opt/homebrew/opt/vllm-metal/bin/metal
		serve
	}

	stdout path = /Users/ada/Library/Logs/vllm-metal/stdio.log
	stderr path = /Users/ada/Library/Logs/vllm-metal/stdio.log
	inherited environment = {
		SSH_AUTH_SOCK => /private/tmp/com.apple.launchd.8PpQ/Listeners
	}

	domain = gui/501 [100057]
	asid = 100057
	minimum runtime = 10
	exit timeout = 60
	runs = 3
	pid = 28474
	immediate reason = semaphore
	last exit code = 1

	semaphores = {
		successful exit => 0
	}

	resource coalition = {
		ID = 1043
		state = active
		active count = 1
	}

	spawn type = interactive (4)
	job state = running
	properties = keepalive | runatload | inferred program
}
"""


def test_the_jobs_own_fields_are_read_and_those_of_blocks_inside_are_not():
    assert parse_job(PRINTED) == Job(
        path="/Users/ada/Library/LaunchAgents/org.vllm-metal.serve.plist",
        state="running",
        pid=28474,
        last_exit="1",
        spawn_type="interactive (4)",
    )


def test_a_signal_and_a_kill_for_memory_stand_in_place_of_the_exit_code():
    assert parse_job("\tlast terminating signal = Terminated: 15\n").last_exit == "Terminated: 15"
    reason = "JETSAM_REASON_MEMORY_HIGHWATER"
    assert parse_job(f"\tlast exit reason = {reason}\n").last_exit == reason


def test_every_way_to_end_has_a_meaning():
    assert "its program, or the folder that it writes to, is missing" in exit_meaning("78: EX_CONFIG")
    assert "killed" in exit_meaning("Killed: 9")
    assert "memory" in exit_meaning("JETSAM_REASON_MEMORY_HIGHWATER")
    assert "Terminated" in exit_meaning("Terminated: 15")
    assert "42" in exit_meaning("42")
    assert exit_meaning("(never exited)") == exit_meaning(None)


def test_a_code_that_we_do_not_know_is_one_to_ask_launchctl_about():
    assert launchctl.meaning(125).endswith("nobody is logged in at the screen")
    assert launchctl.meaning(77) == "77: see `launchctl error 77`"


def test_a_launchctl_that_cannot_be_run_is_named(tmp_path, monkeypatch):
    program = tmp_path / "launchctl"
    program.touch(mode=0o755)
    program.write_bytes(b"\0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match=f"^`{program}` cannot be run: Exec format error$"):
        launchctl.find_job("gui/501/x")


def test_a_launchctl_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    program = tmp_path / "launchctl"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(launchctl, "_BOOTOUT_TIMEOUT_S", 0.1)
    with pytest.raises(ServiceError, match="^`launchctl bootout gui/501/x` gave no answer within 0.1 s$"):
        launchctl.bootout("gui/501/x")


def test_old_and_new_words_for_disabled():
    states = {"a.b": "disabled", "c.d": "true", "e": "enabled", "f": "false"}
    lines = "".join(f'\t\t"{label}" => {state}\n' for label, state in states.items())
    assert parse_disabled(f"\tdisabled services = {{\n{lines}\t}}\n") == {"a.b", "c.d"}


LINES = st.lists(
    st.one_of(
        st.text(),
        st.builds(
            "\t{} = {}".format, st.sampled_from(["pid", "state", "last exit code", "spawn type"]), st.text()
        ),
    )
)


@given(LINES)
def test_anything_at_all_is_read_without_an_error(lines):
    text = "\n".join(lines)
    job = parse_job(text)
    assert job.pid is None or job.pid >= 0
    assert exit_meaning(job.last_exit)
    parse_disabled(text)
