"""The locks say what pyproject.toml asks for, and a system without one is told why."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from vllm_metal.errors import SetupError
from vllm_metal.service import requirements
from vllm_metal.service.requirements import Lock

ROOT = Path(__file__).parent.parent.parent
MAC = {"sys_platform": "darwin", "platform_machine": "arm64", "platform_system": "Darwin"}
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"}
SYSTEMS = {"macos-arm64": MAC, "linux": LINUX}
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def _lock(system: str) -> Lock:
    path = ROOT / "src/vllm_metal/locks" / f"{system}.lock"
    return Lock(path, path.read_text())


def _locked(system: str, python: str) -> dict[str, str]:
    """The version of every package that one Python on one system gets."""
    environment = {**default_environment(), **SYSTEMS[system]}
    environment |= {"python_version": python, "python_full_version": f"{python}.0"}
    wanted = [Requirement(text) for text in _lock(system).requirements]
    found = [each for each in wanted if each.marker is None or each.marker.evaluate(environment)]
    assert len({each.name for each in found}) == len(found) == _lock(system).num_packages
    return {each.name: str(each.specifier).removeprefix("==") for each in found}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_lock_has_all_that_the_project_asks_for(system, python):
    locked = _locked(system, python)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"]):
        if wanted.marker is None or wanted.marker.evaluate(SYSTEMS[system]):
            assert wanted.specifier.contains(locked[wanted.name])
    assert ("mlx-metal" in locked) == (system == "macos-arm64")
    assert ("mlx-cpu" in locked) == (system == "linux")


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_development_and_product_run_on_the_same_versions(system, python):
    text = (ROOT / "requirements/dev.lock").read_text()
    developed = set(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    assert set(_locked(system, python).items()) <= developed


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_package_of_a_lock_has_hashes_and_no_address(system):
    text = _lock(system).text
    assert "://" not in text
    for requirement in re.split(r"\n(?=\S)", text.strip()):
        name, *hashes = requirement.split(" \\\n")
        assert Requirement(name)
        assert hashes
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", each) for each in hashes)


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """Pretend to be a Mac whose kernel answers as told."""

    def pretend(machine: str, **answers: str) -> None:
        cases = "".join(f"{name.replace('__', '.')}) echo {value};;\n" for name, value in answers.items())
        sysctl = tmp_path / "sysctl"
        sysctl.write_text(f'#!/bin/sh\ncase "$2" in\n{cases}*) exit 1;;\nesac\n')
        sysctl.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr(sys, "platform", "darwin")

    return pretend


def test_a_mac_gets_its_own_lock(mac):
    mac("arm64", kern__osproductversion="14.6.1")
    assert requirements.lock().path.name == "macos-arm64.lock"
    assert any(text.startswith("mlx-metal==") for text in requirements.lock().requirements)


@pytest.mark.parametrize(
    ("machine", "answers", "message"),
    [
        ("x86_64", {"hw__optional__arm64": "1"}, "Rosetta"),
        ("x86_64", {}, "Intel processor"),
        ("arm64", {"kern__osproductversion": "13.7"}, "macOS 13.7 is too old"),
    ],
)
def test_a_mac_that_mlx_cannot_run_on_is_told_why(mac, machine, answers, message):
    mac(machine, **answers)
    with pytest.raises(SetupError, match=message) as raised:
        requirements.lock()
    assert raised.value.hint
    assert not raised.value.retryable


def test_other_systems_and_pythons_are_told_so(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(SetupError, match="is not supported") as raised:
        requirements.lock()
    assert raised.value.hint == "run it with Python 3.11 to 3.14"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "freebsd14")
    with pytest.raises(SetupError, match="`freebsd14` is not supported"):
        requirements.lock()


def test_the_lock_is_printed_as_it_is():
    program = "from vllm_metal.cli.launcher import main; main(['setup', '--print-lock'])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == requirements.lock().text
