"""`metal setup`, run from a keg into a home of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keg import PYTHON, Keg, TinyKeg
from vllm_metal import __version__
from vllm_metal.service import launchd


def _users_pip() -> dict[str, str]:
    """The cache of the user's own pip, as the download is large; settings in PIP_* are handed down anyway."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    cache = subprocess.run(
        command, env=os.environ | {"HOME": home}, capture_output=True, text=True, check=True
    )
    return {"PIP_CACHE_DIR": cache.stdout.strip()}


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_real_lock_makes_a_venv_that_works_after_an_attempt_cut_short(tmp_path):
    keg = Keg(tmp_path)
    keg.env |= _users_pip()
    with keg.start("setup") as stopped:
        _read_until(stopped, "installing")
        stopped.send_signal(signal.SIGINT)
    assert not os.path.lexists(keg.venv)
    done = keg.run("setup")
    assert done.returncode == 0, done.stderr
    for command in ([keg.metal], [keg.venv / "bin/metal"], [keg.venv / "bin/vllm"]):
        shown = subprocess.run(
            [*command, "--version"], env=keg.env, capture_output=True, text=True, check=True
        )
        assert shown.stdout == f"vllm-metal {__version__}\n"
    assert keg.run("setup").stderr == ""
    assert keg.run("config", "path").stdout == f"{keg.home}/.config/vllm-metal/config.toml\n"


@pytest.fixture
def keg(tmp_path) -> TinyKeg:
    return TinyKeg(tmp_path)


def _read_until(process: subprocess.Popen[str], text: str) -> None:
    """Wait for a line of the process's talk."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"it ended without {text!r}")


def _pip_list(version: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "pip", "--python", version / "bin/python", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout
    return {each["name"]: each["version"] for each in json.loads(listed)}


_REAL_UV = shutil.which("uv")


@pytest.mark.parametrize(
    "installer",
    [
        "pip",
        "stand-in",
        pytest.param("uv", marks=pytest.mark.skipif(not _REAL_UV, reason="there is no uv here")),
    ],
)
def test_a_venv_is_made_once_and_works_by_both_names(keg, installer):
    if installer == "pip":
        keg.remove_uv()
    elif installer == "uv":
        keg.add_uv(f'#!/bin/sh\nexec "{_REAL_UV}" "$@" --no-config --quiet\n')
        keg.env |= {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(keg.wheels), "UV_NO_CACHE": "1"}
    done = keg.run("setup")
    assert (done.returncode, done.stdout) == (0, f"{keg.venv}\n"), done.stderr
    version = keg.venv.resolve()
    assert done.stderr == f"creating `{version}`\ninstalling 2 packages\nchecking\n"
    assert version.parent == keg.versions
    assert version.name.startswith(f"{__version__}-")

    script = f"source {keg.venv}/bin/activate && metal --version && vllm --version && type -p python"
    shell = subprocess.run(["bash", "-c", script], env=keg.env, capture_output=True, text=True, check=True)
    assert shell.stdout == f"vllm-metal {__version__}\n" * 2 + f"{version}/bin/python\n"
    assert _pip_list(version)["vllm-metal"] == __version__

    stamp = json.loads((version / "vllm-metal.json").read_text())
    assert stamp["version"] == __version__
    assert stamp["launcher"] == str(keg.metal)
    assert Path(stamp["python"]).samefile(PYTHON)

    again = keg.run("setup")
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{keg.venv}\n", "")
    assert keg.venv.resolve() == version


def test_other_commands_make_the_venv_and_become_its_metal(keg):
    done = keg.run("serve", "smollm2", "--port", "1")
    assert done.returncode == 0
    assert "checking\n" in done.stderr
    version = keg.venv.resolve()
    arguments = [str(version / "bin/metal"), "serve", "smollm2", "--port", "1"]
    assert done.stdout == f"{version} {arguments}\n"


def test_an_upgrade_makes_another_version_and_spares_the_one_in_use(keg):
    keg.run("setup")
    (old,) = keg.version_names()
    with keg.start("serve") as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith(str(keg.versions / old))
        keg.change_version("99.0")
        assert keg.run("setup").returncode == 0
        new = keg.venv.resolve().name
        assert new.startswith("99.0-")
        assert keg.version_names() == {old, new}
        # This starts from the new one, and finds the old one in use.
        assert keg.run("chat").returncode == 0
        assert keg.version_names() == {old, new}
        daemon.communicate()
    assert keg.run("chat").returncode == 0
    assert keg.version_names() == {new}


def test_changed_code_of_the_same_version_is_installed_too_and_force_makes_it_anew(keg):
    keg.run("setup")
    first = keg.venv.resolve()
    (keg.package / "added.py").touch()
    keg.run("setup")
    second = keg.venv.resolve()
    assert second != first
    assert next(keg.venv.glob("lib/*/site-packages/vllm_metal/added.py"))
    assert keg.run("setup", "--force").returncode == 0
    assert keg.venv.resolve() != second


def test_the_venvs_own_metal_hands_over_to_what_made_it(keg):
    def setup(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [keg.venv / "bin/vllm", "setup", *arguments]
        return subprocess.run(command, env=keg.env, capture_output=True, text=True, check=False)

    keg.run("setup")
    before = keg.venv.resolve()
    done = setup("--force")
    assert (done.returncode, done.stdout) == (0, f"{keg.venv}\n"), done.stderr
    assert keg.venv.resolve() != before
    keg.metal.unlink()
    done = setup()
    assert done.returncode == 1
    assert f"`{keg.metal}`, which made it, is gone" in done.stderr


def test_a_killed_run_is_simply_run_again(keg):
    with keg.start("setup") as killed:
        _read_until(killed, "installing")
        killed.kill()
    (half_made,) = keg.version_names()
    (keg.versions / half_made / "left over").touch()
    done = keg.run("setup")
    assert done.returncode == 0, done.stderr
    assert keg.version_names() == {keg.venv.resolve().name}
    assert not (keg.versions / half_made / "left over").exists()


def test_ctrl_c_leaves_nothing(keg):
    with keg.start("setup") as stopped:
        _read_until(stopped, "installing")
        stopped.send_signal(signal.SIGINT)
    assert stopped.returncode == 130
    assert not os.path.lexists(keg.venv)
    assert keg.version_names() == set()


def test_of_two_at_once_one_waits_and_finds_it_done(keg):
    keg.versions.mkdir()
    with (keg.versions / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = [keg.start("setup"), keg.start("setup")]
        for run in runs:
            _read_until(run, "waiting for another `metal setup`")
    outputs = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert [stdout for stdout, _ in outputs] == [f"{keg.venv}\n"] * 2
    assert sorted("creating" in stderr for _, stderr in outputs) == [False, True]
    assert len(keg.version_names()) == 1


def _file(venv: Path) -> None:
    venv.write_text("mine")


def _folder(venv: Path) -> None:
    (venv / "bin").mkdir(parents=True)


def _link(venv: Path) -> None:
    (venv.parent / "mine").mkdir()
    venv.symlink_to("mine")


def identity(path: Path) -> tuple[int, ...]:
    """All but when it was last looked at."""
    stat = path.lstat()
    return stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns


@pytest.mark.parametrize("make", [_file, _folder, _link])
def test_what_others_made_is_left_alone(keg, make):
    make(keg.venv)
    before = identity(keg.venv)
    for arguments in (["setup"], ["setup", "--force"], ["serve"]):
        done = keg.run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"error: `{keg.venv}` was not made by `metal setup` and is left alone\n\n"
            "hint: make another by `metal setup --venv PATH` and set `VLLM_METAL_VENV` to PATH\n"
        )
    assert identity(keg.venv) == before
    assert not keg.versions.exists()


def test_another_path_is_a_way_out(keg):
    _folder(keg.venv)
    other = keg.home / "a folder/venv"
    made = keg.run("setup", "--venv", str(other))
    assert made.stdout == f"{other}\n"
    assert made.stderr.endswith(f"set `VLLM_METAL_VENV` to `{other}`, so that other commands find it\n")
    done = keg.run("chat", VLLM_METAL_VENV=str(other))
    assert done.stdout.startswith(str(other.resolve()))
    shown = subprocess.run([other / "bin/vllm", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"vllm-metal {__version__}\n"


def test_a_failed_renewal_leaves_what_there_was(keg):
    keg.run("setup")
    before = keg.venv.resolve()
    next(keg.wheels.glob("tiny-*")).write_bytes(b"")
    keg.change_version("99.0")
    done = keg.run("setup")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: cannot install the packages:\n  " in done.stderr
    assert keg.venv.resolve() == before
    assert keg.version_names() == {before.name}


def test_a_package_of_another_hash_is_refused(keg):
    wheel = next(keg.wheels.glob("tiny-*"))
    wheel.write_bytes(wheel.read_bytes() + b"\n")
    done = keg.run("setup")
    assert done.returncode == 1
    assert "hash" in done.stderr.lower()
    assert not os.path.lexists(keg.venv)


def test_a_package_that_the_lock_names_must_be_there(keg):
    next(keg.wheels.glob("tiny-*")).unlink()
    done = keg.run("setup")
    assert done.returncode == 1
    assert "tiny==1.0" in done.stderr
    assert done.stderr.endswith("hint: `metal setup` begins anew\n")


def test_mlx_must_load(keg):
    wheel = next(keg.wheels.glob("mlx-*"))
    keg.lock([next(keg.wheels.glob("tiny-*"))])
    wheel.unlink()
    done = keg.run("setup")
    assert done.returncode == 1
    assert "error: cannot load MLX:\n" in done.stderr
    assert "No module named 'mlx'" in done.stderr


def test_a_home_that_cannot_be_written_is_named(keg):
    keg.versions.write_text("in the way")
    done = keg.run("setup")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot make `{keg.venv}`: ")
    assert str(keg.home) in done.stderr


def test_a_disk_that_is_full_by_the_last_file_is_told_in_one_line(keg):
    with (keg.package / "service/package.py").open("a") as package:
        package.write(
            "def _fail(*_):\n    raise OSError(28, 'No space left on device')\nshutil.copyfile = _fail\n"
        )
    done = keg.run("setup")
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"error: cannot make `{keg.venv}`: No space left on device\n\n"
        "hint: free some space and run `metal setup` again\n"
    )
    assert keg.run("serve", **UNDER_LAUNCHD).returncode == 1


def test_a_stamp_that_is_none_has_the_venv_made_anew(keg):
    keg.run("setup")
    before = keg.venv.resolve()
    (before / "vllm-metal.json").write_text("[]")
    done = keg.run("chat")
    assert (done.returncode, "creating" in done.stderr) == (0, True), done.stderr
    assert keg.version_names() == {keg.venv.resolve().name} != {before.name}


UNDER_LAUNCHD = {"XPC_SERVICE_NAME": launchd.LABEL}


def _reason(keg: Keg) -> str:
    return json.loads((keg.home / ".local/state/vllm-metal/last_error.json").read_text())["message"]


def test_under_launchd_a_lasting_fault_is_written_down_and_not_tried_again(keg):
    _folder(keg.venv)
    done = keg.run("serve", **UNDER_LAUNCHD)
    assert done.returncode == 0
    assert done.stderr.startswith("error: ")
    assert _reason(keg) == f"`{keg.venv}` was not made by `metal setup` and is left alone"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("dns error: failed to lookup address information", "check the network"),
        ("failed to write: No space left on device (os error 28)", "free some space"),
    ],
)
def test_under_launchd_what_may_pass_is_tried_again(keg, words, hint):
    keg.add_uv(f"#!/bin/sh\necho '{words}' >&2\nexit 2\n")
    done = keg.run("serve", **UNDER_LAUNCHD)
    assert done.returncode == 1
    assert words in _reason(keg)
    assert f"hint: {hint} and run `metal setup` again\n" in done.stderr


def test_no_network_is_told_from_what_pip_says(keg):
    keg.remove_uv()
    del keg.env["PIP_NO_INDEX"], keg.env["PIP_FIND_LINKS"]
    done = keg.run("setup", PIP_INDEX_URL="http://127.0.0.1:1/", PIP_RETRIES="1")
    assert done.returncode == 1
    assert "hint: check the network" in done.stderr
