"""The plist: what it says, what is refused, and who wrote it."""

from __future__ import annotations

import plistlib
import stat
from pathlib import Path

import pytest

from vllm_metal import paths
from vllm_metal.errors import ServiceError
from vllm_metal.service import launchd, plist
from vllm_metal.settings import EXIT_TIMEOUT_S

METAL = Path("/opt/homebrew/opt/vllm-metal/bin/metal")
NAME = f"{launchd.LABEL}.plist"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "A & B <c>"))


def test_what_it_says():
    entries = plistlib.loads(plist.render(METAL))
    assert entries["Label"] == "org.vllm-metal.serve"
    assert entries["ProgramArguments"] == [str(METAL), "serve"]
    assert entries["RunAtLoad"] is True
    assert entries["KeepAlive"] == {"SuccessfulExit": False}
    assert entries["ExitTimeOut"] == EXIT_TIMEOUT_S
    assert entries["ProcessType"] == "Interactive"
    assert entries["LimitLoadToSessionType"] == ["Aqua", "Background"]
    assert entries["StandardOutPath"] == entries["StandardErrorPath"] == str(launchd.stdio_file())
    assert entries["EnvironmentVariables"] == {
        "PATH": "/opt/homebrew/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "VLLM_METAL_VENV": str(paths.venv()),
    }


def test_a_metal_that_is_not_homebrews_finds_what_is_beside_it():
    entries = plistlib.loads(plist.render(Path("/home/ada/.venv/bin/metal")))
    assert entries["EnvironmentVariables"]["PATH"].startswith("/home/ada/.venv/bin:/usr/bin:")


def test_it_is_the_one_that_is_documented():
    folder = Path(__file__).parents[2] / "launchd"
    template = folder / f"{NAME}.template"
    assert template.samefile(Path(plist.__file__).with_name(template.name))
    keys = plistlib.loads(plist.render(METAL)).keys()
    readme = (folder / "README.md").read_text()
    assert [key for key in keys if f"`{key}`" not in readme] == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("<integer>10</integer>", "<string>10</string>", "`ThrottleInterval` cannot be '10'"),
        ("<integer>10</integer>", "<integer>ten</integer>", "invalid"),
        ("<true/>", "<string>yes</string>", "`RunAtLoad` cannot be"),
        ("<string>/opt", "<string>opt", "`ProgramArguments` cannot be"),
        ("<key>ProcessType</key>", "<key>ProcessKind</key>", "`ProcessType` is missing"),
        ("<key>ProcessType</key>", "<key>RunAtLoad</key>", "`RunAtLoad` stands twice"),
        ("Interactive", "Background", "`ProcessType` cannot be 'Background'"),
        ("org.vllm-metal.serve", "org.example", "its label is `org.example`"),
        ("</plist>", "", "no element found"),
    ],
)
def test_what_launchd_would_refuse_or_misread_is_not_written(old: str, new: str, problem: str):
    content = plist.render(METAL).decode()
    assert old in content
    with pytest.raises(ServiceError, match=problem):
        plist.check(content.replace(old, new).encode(), NAME)


def test_a_home_that_no_plist_can_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/\x01")
    with pytest.raises(ServiceError, match="would not be a valid plist"):
        plist.render(METAL)


def test_it_is_written_whole_and_for_the_user_alone_to_change():
    content = plist.render(METAL)
    assert not plist.is_written(content)
    plist.write(content)
    assert plist.is_written(content)
    assert stat.S_IMODE(plist.file().stat().st_mode) == 0o644
    assert [each.name for each in plist.file().parent.iterdir()] == [NAME]


def test_a_folder_that_cannot_be_made():
    home = Path.home()
    home.mkdir()
    (home / "Library").touch()
    with pytest.raises(ServiceError, match="cannot write"):
        plist.write(plist.render(METAL))


def test_what_cannot_be_replaced_is_left_as_it_was():
    plist.file().mkdir(parents=True)
    with pytest.raises(ServiceError, match="cannot write"):
        plist.write(plist.render(METAL))
    assert [each.name for each in plist.file().parent.iterdir()] == [NAME]


def test_homebrews_own_is_told_from_ours():
    ours = plistlib.loads(plist.render(METAL))
    sessions = ["Aqua", "Background", "LoginWindow", "StandardIO", "System"]
    assert not plist.is_from_brew(ours)
    assert plist.is_from_brew(ours | {"LimitLoadToSessionType": sessions})
    assert not plist.is_from_brew(ours | {"LimitLoadToSessionType": sessions, "ProgramArguments": "metal"})


@pytest.mark.parametrize(
    "content", [b"", b"<plist>", b"bplist00garbage", b"\xff", b"<plist><array/></plist>"]
)
def test_what_is_no_plist_says_nothing(tmp_path: Path, content: bytes):
    path = tmp_path / "x.plist"
    path.write_bytes(content)
    assert plist.read(path) == {}
