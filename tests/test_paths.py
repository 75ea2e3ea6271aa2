"""Where files are, on both systems."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_metal import paths


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def mac(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.fixture
def linux(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def test_on_a_mac_all_is_in_library(mac, home, monkeypatch):
    for name in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", "/elsewhere")
    support = home / "Library/Application Support/vllm-metal"
    assert paths.config_file() == support / "config.toml"
    assert paths.data_dir() == paths.state_dir() == support
    assert paths.models_dir() == support / "models"
    assert paths.log_dir() == home / "Library/Logs/vllm-metal"
    assert paths.cache_dir() == home / "Library/Caches/vllm-metal"


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_elsewhere_the_defaults_are_xdgs(linux, home, monkeypatch, value):
    for name in ("CONFIG", "DATA", "STATE", "CACHE"):
        if value is not None:
            monkeypatch.setenv(f"XDG_{name}_HOME", value)
    assert paths.config_file() == home / ".config/vllm-metal/config.toml"
    assert paths.data_dir() == home / ".local/share/vllm-metal"
    assert paths.state_dir() == home / ".local/state/vllm-metal"
    assert paths.log_dir() == home / ".local/state/vllm-metal/log"
    assert paths.cache_dir() == home / ".cache/vllm-metal"


def test_elsewhere_xdgs_variables_are_honoured(linux, monkeypatch):
    for name in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", f"/{name}")
    assert paths.config_file() == Path("/CONFIG/vllm-metal/config.toml")
    assert paths.data_dir() == Path("/DATA/vllm-metal")
    assert paths.state_dir() == Path("/STATE/vllm-metal")
    assert paths.log_dir() == Path("/STATE/vllm-metal/log")
    assert paths.cache_dir() == Path("/CACHE/vllm-metal")


def test_the_venv_is_in_the_home_unless_named(home, monkeypatch):
    assert paths.venv() == home / ".venv-vllm-metal"
    monkeypatch.setenv("VLLM_METAL_VENV", "~/other")
    assert paths.venv() == home / "other"
    assert paths.venv("/named/../other") == Path("/other")
    monkeypatch.setenv("VLLM_METAL_VENV", "")
    assert paths.venv() == home / ".venv-vllm-metal"
