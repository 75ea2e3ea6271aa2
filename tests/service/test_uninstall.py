"""`metal uninstall` takes away what is ours and says what it leaves; nothing of others."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keg import stamp
from terminal import on_terminal
from vllm_metal import paths
from vllm_metal.errors import MetalError
from vllm_metal.service import agent, launchctl, plist, uninstall, venv
from vllm_metal.service.launchd import LABEL, reason_file

COMMAND = [sys.executable, "-c", "from vllm_metal.cli.launcher import main; main()", "uninstall"]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def used(home) -> Path:
    """A home in which everything was used, and nothing runs."""
    for path, num_bytes in {
        paths.chat_history(): 10,
        paths.last_used_dir() / "38f6d3c8": 10,
        reason_file(): 10,
        reason_file().with_suffix(".123"): 10,
        paths.log_dir() / "metal.log": 10,
        paths.log_dir() / "metal.log.1": 10,
        paths.cache_dir() / "anything" / "at all": 10,
        paths.config_file(): 10,
        paths.models_dir() / "smollm2" / "model.gguf": 98_000_000,
        home / ".cache/huggingface/hub/models--org--name/blobs/weights": 4_300_000_000,
    }.items():
        _write(path, num_bytes)
    snapshot = home / ".cache/huggingface/hub/models--org--name/snapshots/1/model.safetensors"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to("../../blobs/weights")
    paths.config_file().write_text("# mine\n")
    _make_venv(paths.venv())
    return home


def _write(path: Path, num_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        # Takes no space.
        file.truncate(num_bytes)


def _make_venv(path: Path) -> None:
    version = venv.new_version(path)
    _write(version / "bin" / "metal", 10)
    with venv.exclusive(path, lambda: None):
        venv.switch(path, version)


def _run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    return done.stderr


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()
    }


def _said_to_be_left(text: str) -> list[str]:
    _, _, left = text.partition("to be left:\n")
    return [line.strip() for line in left.splitlines() if line.startswith("  ")]


def test_nothing_is_there(home):
    assert _run("--yes").startswith("nothing is there to remove\n")
    assert not list(home.iterdir())


def test_all_goes_but_configuration_and_models(used):
    hub = used / ".cache/huggingface/hub"
    left = _said_to_be_left(_run("--yes"))
    assert left == [
        f"{paths.models_dir()}  98.0 MB: `--purge` removes it",
        f"{paths.config_file()}  7 B: `--purge` removes it",
        f"{hub}: other programs may use its models",
        "org/name  4.3 GB",
    ]
    assert {used / name for name in _files(used)} == {
        paths.config_file(),
        paths.models_dir() / "smollm2" / "model.gguf",
        hub / "models--org--name/blobs/weights",
        hub / "models--org--name/snapshots/1/model.safetensors",
    }


def test_purge_leaves_only_what_is_shared(used):
    text = _run("--purge", "--yes")
    assert f"  {paths.models_dir()}  98.0 MB\n" in text
    assert [path.name for path in used.iterdir() if _files(path)] == [".cache"]
    assert [path.name for path in (used / ".cache").iterdir()] == ["huggingface"]


def test_no_empty_folders_of_ours_stay(used):
    _run("--purge", "--yes")
    assert not [path for path in used.rglob("*") if path.name.startswith(("vllm-metal", ".venv"))]


def test_a_second_time_there_is_nothing_left_to_remove(used):
    first, second = _run("--yes"), _run("--yes")
    assert second.startswith("nothing is there to remove\n")
    assert _said_to_be_left(second) == _said_to_be_left(first)


def test_without_a_terminal_it_wants_a_yes(used):
    before = _files(used)
    assert "\nhint: `--yes` says yes" in _run(code=1)
    assert _files(used) == before


@pytest.mark.parametrize(
    ("answer", "goes"), [("y", True), ("yes", True), ("", False), ("n", False), ("\x04", False)]
)
def test_asks_on_a_terminal(used, answer, goes):
    before = _files(used)
    with on_terminal("uninstall", env=dict(os.environ)) as terminal:
        terminal.expect("remove? [y/N] ")
        terminal.type(answer if answer == "\x04" else f"{answer}\n")
        assert terminal.exit_code() == 0
    assert (_files(used) != before) is goes


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_hub_cache_is_where_the_hubs_client_keeps_it(home, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    hub = Path(subprocess.run(
        [sys.executable, "-c", "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.strip())  # fmt: skip
    _write(hub / "models--org--name" / "blobs" / "weights", 5000)
    _write(hub / "datasets--org--name" / "blobs" / "rows", 5000)
    assert _said_to_be_left(_run("--yes")) == [
        f"{hub}: other programs may use its models",
        "org/name  5.0 kB",
    ]


@pytest.mark.parametrize(
    "arguments", [["/bin/sleep", "1000"], ["/bin/sh", "-c", "sleep 1000 # /opt/vllm-metal/"]]
)
def test_service_goes_whoever_installed_it(user, monkeypatch, arguments):
    monkeypatch.delenv("SUDO_UID", raising=False)
    for name, value in user.env.items():
        monkeypatch.setenv(name, value)
    plist.file().parent.mkdir(parents=True)
    sessions = ["Aqua", "Background", "LoginWindow", "StandardIO", "System"]
    entries = {"Label": LABEL, "RunAtLoad": True, "LimitLoadToSessionType": sessions}
    plist.file().write_bytes(plistlib.dumps(entries | {"ProgramArguments": arguments}))
    assert plist.is_from_brew(plist.read(plist.file())) is (arguments[0] == "/bin/sh")
    assert launchctl.bootstrap(agent.home_domain(), plist.file()) == 0
    assert f"  the service `{LABEL}`\n" in _run("--yes")
    assert not user.launchd.jobs()
    assert not plist.file().exists()


def test_venv_of_others_stays(home):
    _write(paths.venv() / "pyvenv.cfg", 10)
    assert _said_to_be_left(_run("--yes")) == [f"{paths.venv()}  10 B: `metal setup` did not make it"]
    assert (paths.venv() / "pyvenv.cfg").exists()


def test_link_of_others_in_place_of_the_venv_stays(home, tmp_path):
    _write(tmp_path / "other" / "pyvenv.cfg", 10)
    paths.venv().symlink_to(tmp_path / "other")
    _run("--yes")
    assert (paths.venv() / "pyvenv.cfg").exists()


def test_half_made_venv_goes(home):
    version = venv.new_version(paths.venv())
    _write(version / "pyvenv.cfg", 10)
    assert str(paths.venv()) in _run("--yes")
    assert not list(home.iterdir())


@contextmanager
def _running_from(version: Path) -> Iterator[None]:
    program = (
        "import sys; from pathlib import Path; from vllm_metal.service import venv\n"
        "venv.hold(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program, version], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


def test_venv_that_something_runs_from_stays_and_all_else_goes(used):
    version = paths.venv().resolve()
    stamp(version)
    with _running_from(version):
        text = _run("--yes", code=1)
        assert f"error: a `metal` still runs from `{version}`\n\nhint: end it" in text
        assert (version / "bin" / "metal").exists()
        assert not paths.log_dir().exists()
    _run("--yes")
    assert not os.path.lexists(paths.venv())


def test_venv_goes_by_its_own_uninstall_too(used):
    version = paths.venv().resolve()
    stamp(version)
    program = f"import sys; sys.prefix = {str(version)!r}; from vllm_metal.cli.main import main; main()"
    command = [sys.executable, "-c", program, "uninstall", "--yes"]
    subprocess.run(command, check=True, capture_output=True)
    assert not version.exists()


def test_files_of_others_beside_the_venvs_versions_stay(home, monkeypatch):
    """As `VLLM_METAL_VENV` may be any path, that of the versions may be somebody's folder."""
    monkeypatch.setenv("VLLM_METAL_VENV", str(home / "etc"))
    _write(home / "etc.d" / "mine.conf", 10)
    _make_venv(home / "etc")
    _run("--yes")
    assert _files(home) == {"etc.d/mine.conf"}
    assert _run("--yes").startswith("nothing is there to remove\n")


@pytest.mark.skipif(sys.platform == "darwin", reason="there it is in no other folder of ours")
def test_log_folder_that_is_a_link_goes_without_what_it_leads_to(home, tmp_path):
    _write(tmp_path / "logs" / "metal.log", 10)
    paths.state_dir().mkdir(parents=True)
    paths.log_dir().symlink_to(tmp_path / "logs")
    assert "to be left" not in _run("--yes")
    assert not _files(home)
    assert (tmp_path / "logs" / "metal.log").exists()


@pytest.mark.parametrize("folder", [paths.cache_dir, paths.state_dir])
def test_folder_that_is_a_link_stays_with_what_it_leads_to(home, tmp_path, folder):
    _write(tmp_path / "elsewhere" / "chat_history", 10)
    folder().parent.mkdir(parents=True)
    folder().symlink_to(tmp_path / "elsewhere")
    assert f"{folder()}  0 B: it is a link to elsewhere" in _said_to_be_left(_run("--purge", "--yes"))
    assert (folder() / "chat_history").exists()


def test_file_in_place_of_a_folder_of_ours_stays_and_is_named(home):
    _write(paths.state_dir(), 10)
    assert _said_to_be_left(_run("--yes")) == [f"{paths.state_dir()}  10 B: `metal` did not make it"]
    assert paths.state_dir().exists()


def test_links_in_our_folders_go_without_what_they_lead_to(home, tmp_path):
    _write(tmp_path / "disk" / "model.gguf", 10)
    _write(tmp_path / "disk" / "log", 10)
    for link, target in {
        paths.models_dir(): tmp_path / "disk",
        paths.state_dir() / "chat_history": tmp_path / "disk" / "log",
        paths.log_dir() / "metal.log": tmp_path / "disk" / "log",
        paths.cache_dir() / "folder": tmp_path / "disk",
    }.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    _run("--purge", "--yes")
    assert not _files(home)
    assert _files(tmp_path / "disk") == {"model.gguf", "log"}


def test_files_of_others_in_our_folders_stay_and_are_named(home):
    mine = [
        paths.data_dir() / "notes.txt",
        paths.state_dir() / "x" / "y",
        paths.config_file().with_name("x.toml"),
    ]
    for path in mine:
        _write(path, 10)
    text = _run("--purge", "--yes")
    assert {home / name for name in _files(home)} == set(mine)
    assert text.count("`metal` did not make it") == 3


def test_models_that_the_configuration_has_elsewhere_stay(home, tmp_path):
    _write(tmp_path / "models" / "model.gguf", 2_000_000)
    _write(paths.config_file(), 0)
    paths.config_file().write_text(f'models.dir = "{tmp_path}/models"\n')
    (left,) = _said_to_be_left(_run("--purge", "--yes"))
    assert left == f"{tmp_path}/models  2.0 MB: `models.dir` names it, and others may use it"
    assert (tmp_path / "models" / "model.gguf").exists()


def test_a_broken_configuration_is_no_obstacle(used):
    paths.config_file().write_text("[broken")
    _run("--purge", "--yes")
    assert not paths.config_file().exists()


def test_what_cannot_be_removed_is_named_once_all_else_is(home, tmp_path):
    _write(tmp_path / "file", 10)
    _write(tmp_path / "later", 10)
    impossible = tmp_path / "file" / "below"
    plan = uninstall.Plan(False, False, (impossible, tmp_path / "later"), (), ())
    with pytest.raises(MetalError, match=f"`{impossible}` cannot be removed: Not a directory"):
        uninstall.carry_out(plan, lambda: None)
    assert not (tmp_path / "later").exists()
