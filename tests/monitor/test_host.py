from __future__ import annotations

from pathlib import Path

import pytest

from fake_mac import FakeMac
from vllm_metal.monitor import host
from vllm_metal.monitor.host import parse_version


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    fake = FakeMac(tmp_path / "mac")
    monkeypatch.setenv("PATH", fake.path)
    return fake


def test_a_mac(mac: FakeMac) -> None:
    read = host.read()
    assert (read.chip, read.model, read.macos_version) == ("Apple M4 Max", "Mac16,5", (26, 1))
    assert (read.is_mac, read.is_apple_silicon, read.is_translated) == (True, True, False)
    assert (read.pressure, read.wired_limit_bytes) == ("normal", 0)
    assert read.swap_used_bytes == int(512.5 * 2**20)
    assert read.memory_bytes > read.memory_available_bytes > 0


@pytest.mark.parametrize("compatibility", ["0", "1", None])
def test_the_version_is_true_whatever_the_shell_asks_for(
    mac: FakeMac, monkeypatch: pytest.MonkeyPatch, compatibility: str | None
) -> None:
    if compatibility is not None:
        monkeypatch.setenv("SYSTEM_VERSION_COMPAT", compatibility)
    mac.set_version("15.6.1")
    assert host.read().macos_version == (15, 6, 1)


def test_the_kernel_tells_the_version_where_sw_vers_does_not(mac: FakeMac) -> None:
    (mac.folder / "version").write_text("10.16\n")
    assert host.read().macos_version == (26, 1)
    mac.set("kern.osproductversion", None)
    assert host.read().macos_version is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("26.1\n", (26, 1)),
        ("27", (27,)),
        ("14.7.2", (14, 7, 2)),
        ("16.0", (26, 0)),
        ("16.1", (26, 1)),
        ("10.16", None),
        ("10.15.7", (10, 15, 7)),
        ("", None),
        ("26.1 beta", None),
        ("²6", None),
        ("26..1", None),
    ],
)
def test_versions(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_rosetta_and_intel(mac: FakeMac) -> None:
    mac.set("sysctl.proc_translated", "1")
    assert host.read().is_translated
    mac.set("sysctl.proc_translated", None)
    mac.set("hw.optional.arm64", None)
    intel = host.read()
    assert (intel.is_translated, intel.is_apple_silicon) == (False, False)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("kern.memorystatus_vm_pressure_level", "2", "pressure", "warning"),
        ("kern.memorystatus_vm_pressure_level", "4", "pressure", "critical"),
        ("kern.memorystatus_vm_pressure_level", "3", "pressure", None),
        ("kern.memorystatus_vm_pressure_level", None, "pressure", None),
        ("vm.swapusage", "total = 9,00G  used = 1,25G  free = 7,75G", "swap_used_bytes", 1280 * 2**20),
        ("vm.swapusage", "total = 0.00M  used = 0.00M", "swap_used_bytes", 0),
        ("vm.swapusage", "used = 12.", "swap_used_bytes", None),
        ("iogpu.wired_limit_mb", "24576", "wired_limit_bytes", 24576 * 2**20),
        ("iogpu.wired_limit_mb", "-1", "wired_limit_bytes", None),
        ("iogpu.wired_limit_mb", None, "wired_limit_bytes", None),
        ("machdep.cpu.brand_string", "Apple\x1b[2J", "chip", None),
    ],
)
def test_what_sysctl_says(mac: FakeMac, name: str, value: str | None, field: str, expected: object) -> None:
    mac.set(name, value)
    assert getattr(host.read(), field) == expected


def test_tools_that_fail_leave_gaps(mac: FakeMac) -> None:
    for name in ("sysctl", "sw_vers"):
        (mac.folder / name).write_text("#!/bin/sh\nexit 1\n")
    read = host.read()
    assert (read.is_mac, read.chip, read.macos_version, read.pressure) == (False, None, None, None)
