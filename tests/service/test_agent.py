"""`metal service` and a real daemon under launchd, from install to uninstall."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

import tiny_folder
from fake_launchctl import FakeLaunchd
from mac_user import User
from scripted_server import replies, serving
from server_process import METAL
from vllm_metal import __version__
from vllm_metal.service import package
from vllm_metal.service.launchd import LABEL

pytestmark = pytest.mark.slow

GUI, WITHOUT_SCREEN = f"gui/{os.getuid()}", f"user/{os.getuid()}"
EDITED = b"<integer>30</integer>"


@pytest.fixture
def no_model(tmp_path: Path, user: User) -> User:
    """Her daemon stays up and says that there is no model: it starts faster than with one."""
    (tmp_path / "empty").mkdir()
    user.config(model=tmp_path / "empty")
    return user


def answers(status: dict) -> bool:
    return status["health"] == "unavailable" and status["pid"] is not None


def program(path: Path, text: str = "from vllm_metal.cli.main import main\nmain()\n") -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def edit(plist: Path) -> None:
    """As another version would have written it."""
    content = plist.read_bytes()
    assert b"<integer>10</integer>" in content
    plist.write_bytes(content.replace(b"<integer>10</integer>", EDITED))


def test_from_install_to_uninstall_with_a_model(user: User, launchd: FakeLaunchd, tmp_path: Path):
    user.config(model=tiny_folder.save(tmp_path / "tiny"))
    before = sorted(user.home.rglob("*"))
    assert user.status()["installed"] is False

    assert "started the service" in user.does("install")
    status = user.status_when(lambda status: status["healthy"])
    first = status["pid"]
    assert status == status | {
        "managed_by": "metal",
        "installed": True,
        "plist_current": True,
        "disabled": False,
        "loaded": True,
        "domain": GUI,
        "state": "running",
        "last_exit": "(never exited)",
        "process_type": "interactive (4)",
        "version_running": __version__,
        "version_installed": __version__,
        "restart_needed": False,
        "start_error": None,
    }
    done = user.service("status")
    assert (done.returncode, done.stderr) == (0, "")

    os.kill(first, signal.SIGKILL)
    status = user.status_when(lambda status: status["healthy"] and status["pid"] != first)
    assert status["last_exit"] == "Killed: 9"

    with user.streaming(max_tokens=100) as rest:
        assert "stopped" in user.does("stop")
        assert rest().endswith(b"data: [DONE]\n\n")
    assert "SIGTERM: finishing what is under way" in user.log.read_text()
    status = user.status()
    assert (status["installed"], status["loaded"], status["pid"]) == (True, False, None)
    assert "the service is stopped" in user.service("status").stderr
    assert launchd.jobs() == []

    assert "started" in user.does("start")
    user.status_when(lambda status: status["healthy"])
    assert "removed" in user.does("uninstall")
    assert launchd.jobs() == []
    left = [path for path in user.home.rglob("*") if path.is_file() and path not in before]
    # When a model was used last is told of the model, not of the service.
    assert [path for path in left if path.parent.name != "last_used"] == []


def test_every_verb_may_be_said_twice(no_model: User, launchd: FakeLaunchd):
    user = no_model
    assert "not running" in user.does("stop")
    assert "not installed" in user.does("uninstall")
    for verb in ("start", "restart"):
        done = user.service(verb)
        assert (done.returncode, "`metal service install`" in done.stderr) == (1, True)
    user.does("install")
    pid = user.status_when(answers)["pid"]
    for verb in ("install", "start"):
        assert f"runs already (pid {pid})" in user.does(verb)
    assert [call[0] for call in launchd.calls()] == ["enable", "bootstrap"]
    assert "restarted" in user.does("restart")
    assert "restarted" in user.does("restart")
    assert user.status_when(answers)["pid"] != pid
    assert "stopped" in user.does("stop")
    assert "not running" in user.does("stop")
    assert "removed" in user.does("uninstall")
    assert "not installed" in user.does("uninstall")


def test_a_changed_plist_is_loaded_anew_and_an_unchanged_one_kickstarted(
    no_model: User, launchd: FakeLaunchd
):
    user = no_model
    user.does("install")
    pid = user.status_when(answers)["pid"]
    edit(user.plist)
    assert user.status()["plist_current"] is False
    assert "restarted" in user.does("install")
    status = user.status_when(answers)
    assert (status["plist_current"], status["pid"] != pid) == (True, True)
    [job] = launchd.jobs()
    assert job.plist["ThrottleInterval"] == 10
    assert [call[0] for call in launchd.calls()] == ["enable", "bootstrap", "bootout", "enable", "bootstrap"]

    # A clean end of its own accord stays one.
    os.kill(status["pid"], signal.SIGTERM)
    ended = user.status_when(lambda status: status["pid"] is None)
    assert (ended["loaded"], ended["state"], ended["last_exit"]) == (True, "not running", "0")
    assert "it ended as it was asked to" in user.service("status").stderr
    assert "started" in user.does("install")
    assert user.status_when(answers)["loaded"]
    assert [call[0] for call in launchd.calls()[5:]] == ["kickstart"]


def test_a_mistake_in_the_config_is_told_and_not_tried_again(no_model: User, launchd: FakeLaunchd):
    user, good = no_model, no_model.config_file.read_text()
    user.config(text="[server]\nprot = 1\n")
    for verb in ("install", "install", "restart", "start"):
        done = user.service(verb)
        assert done.returncode == 1
        assert "error: the service cannot start: " in done.stderr
        assert "hint: did you mean `server.port`?" in done.stderr
        status = user.status_when(lambda status: status["pid"] is None)
        assert (status["state"], status["last_exit"]) == ("not running", "0")
        [job] = launchd.jobs()
        assert job.facts["runs"] == 1
    shown = user.service("status")
    assert shown.returncode == 3
    assert "did you mean `server.port`?" in shown.stderr
    logs = user.service("logs")
    assert (logs.returncode, "`server.prot`" in logs.stdout) == (0, True)
    user.config(text=good)
    user.does("start")
    assert user.status_when(answers)["start_error"] is None


def test_a_port_that_another_program_has_is_waited_for(no_model: User):
    user = no_model
    with serving() as other:
        other.on("/version", replies({"version": "0.9.0"}))
        other.on("/ready", replies({}))
        port = int(other.url.rpartition(":")[2])
        socket_line = f'uds = "{user.socket}"'
        user.config(text=user.config_file.read_text().replace(socket_line, f"port = {port}"))
        done = user.service("install")
        assert done.returncode == 1
        assert f"port {port} is used by" in done.stderr
        assert f"port {port} is used by" in user.service("status").stderr
    status = user.status_when(answers)
    assert (status["start_error"], status["url"]) == (None, f"http://127.0.0.1:{port}")


def test_the_same_version_of_other_code_wants_a_restart(no_model: User):
    """Versions under development share a number."""
    user = no_model
    with serving() as other:
        other.on("/ready", replies({}))
        port = int(other.url.rpartition(":")[2])
        user.config(text=f"[server]\nport = {port}\n")
        for package_sha256, restart_needed in ((package.sha256(), False), ("0" * 64, True)):
            version = {"version": __version__, "pid": 1, "package_sha256": package_sha256}
            other.on("/version", replies(version))
            assert user.status()["restart_needed"] is restart_needed


def test_a_plist_that_others_may_write_to_is_written_anew(no_model: User):
    """launchd would refuse it."""
    user = no_model
    user.does("install")
    user.does("stop")
    user.plist.chmod(0o664)
    assert user.status()["plist_current"] is False
    assert "started" in user.does("start")


def test_a_disabled_label_is_enabled(no_model: User, launchd: FakeLaunchd):
    user = no_model
    user.does("install")
    user.does("stop")
    launchd.call("disable", f"{GUI}/{LABEL}")
    assert user.status()["disabled"] is True
    assert "the service is disabled" in user.service("status").stderr
    user.does("start")
    assert user.status_when(answers)["disabled"] is False


def test_a_label_that_still_drains_is_tried_again(no_model: User, launchd: FakeLaunchd):
    launchd.set(num_refusals=2)
    no_model.does("install")
    assert len(launchd.calls("bootstrap")) == 3
    assert no_model.status_when(answers)["loaded"]


def test_a_bootout_that_does_not_wait_is_waited_for(no_model: User, launchd: FakeLaunchd):
    launchd.set(leaves_draining=True, loaded_code=37)
    no_model.does("install")
    no_model.does("restart")
    assert len(launchd.calls("bootstrap")) == 2
    no_model.does("uninstall")
    assert launchd.jobs() == []


def test_what_launchd_keeps_refusing_is_told(no_model: User, launchd: FakeLaunchd):
    launchd.set(num_refusals=99)
    done = no_model.service("install")
    assert done.returncode == 1
    assert "launchd did not take the service: 5: " in done.stderr
    assert "Login Items" in done.stderr
    launchd.set(num_refusals=0)
    no_model.does("install")
    assert no_model.status_when(answers)["loaded"]


def test_without_a_login_at_the_screen_it_runs_in_the_users_domain(no_model: User, launchd: FakeLaunchd):
    user = no_model
    launchd.set(absent={GUI: 125})
    user.does("install")
    assert user.status_when(answers)["domain"] == WITHOUT_SCREEN
    # She has logged in: it is found where it is, and moves when it is started anew.
    launchd.set(absent={})
    assert "runs already" in user.does("install")
    assert user.status()["domain"] == WITHOUT_SCREEN
    user.does("restart")
    assert user.status_when(answers)["domain"] == GUI
    assert len(launchd.jobs()) == 1


def plist_of_brew(user: User, opt: Path) -> str:
    """What Homebrew's service says."""
    shown = user.service("plist").stdout.replace(METAL, str(program(opt / "bin" / "metal")))
    sessions = "<string>LoginWindow</string><string>StandardIO</string><string>System</string>"
    user.stdio.parent.mkdir(parents=True)
    return shown.replace("<string>Aqua</string>", f"<string>Aqua</string>{sessions}")


def test_homebrews_service_is_left_to_homebrew(no_model: User, launchd: FakeLaunchd, tmp_path: Path):
    user = no_model
    written = plist_of_brew(user, tmp_path / "opt" / "vllm-metal")
    user.plist.parent.mkdir(parents=True)
    user.plist.write_text(written)
    launchd.call("bootstrap", GUI, str(user.plist))

    done = user.service("install")
    assert done.returncode == 1
    assert "`brew services restart vllm-metal`" in done.stderr
    status = user.status_when(answers)
    assert (status["managed_by"], status["plist_current"]) == ("brew", None)
    assert "by Homebrew" in user.service("status").stdout
    user.does("restart")
    user.does("stop")
    user.does("start")
    assert user.plist.read_text() == written
    user.does("uninstall")
    assert (launchd.jobs(), user.plist.exists()) == ([], False)


def test_a_service_that_homebrew_runs_from_its_keg_is_known(
    no_model: User, launchd: FakeLaunchd, tmp_path: Path
):
    """As `brew services run` does, which installs nothing."""
    user, opt = no_model, tmp_path / "opt" / "vllm-metal"
    plist = opt / user.plist.name
    written = plist_of_brew(user, opt)
    plist.write_text(written)
    launchd.call("bootstrap", GUI, str(plist))
    done = user.service("install")
    assert (done.returncode, user.plist.exists()) == (1, False)
    assert "the service is managed by Homebrew" in done.stderr
    status = user.status_when(answers)
    assert (status["managed_by"], status["installed"]) == ("brew", False)
    user.does("uninstall")
    assert launchd.jobs() == []
    assert plist.read_text() == written


def test_a_program_that_is_gone_is_named_as_the_reason(no_model: User, tmp_path: Path):
    user = no_model
    user.metal = program(tmp_path / "bin" / "metal")
    user.does("install")
    pid = user.status_when(answers)["pid"]
    user.metal.rename(tmp_path / "elsewhere")
    os.kill(pid, signal.SIGKILL)
    user.metal = tmp_path / "elsewhere"
    status = user.status_when(lambda status: status["last_exit"] == "78: EX_CONFIG")
    assert "its program, or the folder that it writes to, is missing" in status["last_exit_meaning"]


def test_what_does_not_end_is_killed_after_its_time(no_model: User, launchd: FakeLaunchd, tmp_path: Path):
    user = no_model
    launchd.set(exit_timeout_scale=0.01)
    user.metal = program(
        tmp_path / "bin" / "metal",
        "import asyncio, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "asyncio.SelectorEventLoop.add_signal_handler = lambda *_: None\n"
        "from vllm_metal.cli.main import main\n"
        "main()\n",
    )
    user.does("install")
    pid = user.status_when(answers)["pid"]
    user.does("stop")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_after_an_upgrade_a_restart_is_asked_for(no_model: User, tmp_path: Path):
    user, opt = no_model, tmp_path / "opt" / "vllm-metal"
    kegs = [tmp_path / "Cellar" / "vllm-metal" / version for version in ("0.1.0", "0.2.0")]
    for keg in kegs:
        program(keg / "bin" / "metal")
    opt.parent.mkdir()
    opt.symlink_to(kegs[0])
    user.metal = kegs[0] / "bin" / "metal"
    user.does("install")
    [job] = user.launchd.jobs()
    assert job.plist["ProgramArguments"] == [str(opt / "bin" / "metal"), "serve"]
    assert user.status_when(answers)["restart_needed"] is False

    opt.unlink()
    opt.symlink_to(kegs[1])
    user.metal = kegs[1] / "bin" / "metal"
    status = user.status()
    assert (status["restart_needed"], status["plist_current"]) == (True, True)
    user.does("restart")
    assert user.status_when(answers)["restart_needed"] is False


def test_the_daemon_has_launchds_environment_and_files_enough(no_model: User):
    user = no_model
    user.stdio.parent.mkdir(parents=True)
    user.stdio.write_bytes(b"old\n" * 2**19)
    done = user.service("install", METAL_LOG_LEVEL="debug")
    assert "`METAL_LOG_LEVEL`" in done.stderr
    pid = user.status_when(answers)["pid"]
    assert b"old" not in user.stdio.read_bytes()
    if sys.platform == "linux":
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        names = {entry.partition("=")[0] for entry in environ if entry}
        assert names <= {"PATH", "VLLM_METAL_VENV", "XPC_SERVICE_NAME", *_USER_VARIABLES}
        limits = Path(f"/proc/{pid}/limits").read_text()
        [(soft, hard)] = re.findall(r"^Max open files +(\w+) +(\w+)", limits, re.MULTILINE)
        assert int(soft) == (8192 if hard == "unlimited" else min(8192, int(hard)))


_USER_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR")


def test_the_log_is_the_one_that_the_config_names(no_model: User, tmp_path: Path):
    user = no_model
    log = tmp_path / "own.log"
    user.config(text=f'{user.config_file.read_text()}\n[log]\nfile = "{log}"\n')
    user.does("install")
    user.status_when(answers)
    assert not user.log.exists()
    shown = user.service("logs").stdout
    assert "ERROR" in shown
    assert log.read_text().startswith(shown)


def test_a_log_folder_that_cannot_be_made(user: User, launchd: FakeLaunchd):
    user.state.parent.mkdir(parents=True)
    user.state.touch()
    done = user.service("install")
    assert done.returncode == 1
    assert f"error: cannot change `{user.log.parent}`: " in done.stderr
    assert launchd.jobs() == []


@pytest.mark.parametrize("verb", ["install", "uninstall", "start", "stop", "restart", "status", "logs"])
def test_where_there_is_no_launchctl(user: User, tmp_path: Path, verb: str):
    done = user.service(verb, PATH=str(tmp_path))
    assert done.returncode == 1
    assert "error: there is no `launchctl` here" in done.stderr
    assert not user.plist.exists()


def test_the_plist_is_shown_on_any_system(no_model: User, tmp_path: Path):
    user = no_model
    done = user.service("plist", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    user.does("install")
    assert done.stdout == user.plist.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be told from a user")
def test_sudo_is_refused(user: User):
    done = user.service("install", SUDO_UID="501")
    assert done.returncode == 1
    assert "`sudo`" in done.stderr
