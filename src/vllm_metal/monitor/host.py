"""The machine: chip, macOS, Rosetta, memory. Whatever cannot be told is None."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

from vllm_metal.monitor import command

Pressure = Literal["normal", "warning", "critical"]

_PRESSURES: Mapping[str, Pressure] = {"1": "normal", "2": "warning", "4": "critical"}
_UNIT_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30}
_NAMES = (
    "machdep.cpu.brand_string",
    "hw.model",
    "hw.optional.arm64",
    "sysctl.proc_translated",
    "kern.osproductversion",
    "kern.memorystatus_vm_pressure_level",
    "vm.swapusage",
    "iogpu.wired_limit_mb",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`macos_version` is None on every other system; `wired_limit_bytes` is 0 for macOS's own choice."""

    chip: str | None = None
    model: str | None = None
    macos_version: tuple[int, ...] | None = None
    is_mac: bool = False
    is_apple_silicon: bool = False
    is_translated: bool = False
    memory_bytes: int
    memory_available_bytes: int
    memory_wired_bytes: int | None = None
    pressure: Pressure | None = None
    swap_used_bytes: int | None = None
    wired_limit_bytes: int | None = None


def read() -> Host:
    values = _sysctl(command.run("sysctl", *_NAMES).stdout)
    version = parse_version(command.run("sw_vers", "-productVersion").stdout) or parse_version(
        values.get("kern.osproductversion", "")
    )
    is_apple_silicon = values.get("hw.optional.arm64") == "1"
    memory = psutil.virtual_memory()
    limit_mb = values.get("iogpu.wired_limit_mb", "")
    return Host(
        chip=values.get("machdep.cpu.brand_string"),
        model=values.get("hw.model"),
        macos_version=version,
        is_mac=version is not None or sys.platform == "darwin",
        is_apple_silicon=is_apple_silicon,
        is_translated=values.get("sysctl.proc_translated") == "1"
        or (sys.platform == "darwin" and is_apple_silicon and platform.machine() == "x86_64"),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_wired_bytes=getattr(memory, "wired", None),
        pressure=_PRESSURES.get(values.get("kern.memorystatus_vm_pressure_level", "")),
        swap_used_bytes=_swap_used_bytes(values),
        wired_limit_bytes=int(limit_mb) * 2**20 if re.fullmatch(r"[0-9]{1,9}", limit_mb) else None,
    )


def parse_version(text: str) -> tuple[int, ...] | None:
    """`26.1` as (26, 1). The 16 that some programs are told stands for 26; 10.16 stands for any version."""
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}", text.strip()):
        return None
    version = tuple(map(int, text.strip().split(".")))
    if version[:2] == (10, 16):
        return None
    return (26, *version[1:]) if version[0] == 16 else version


def _sysctl(text: str) -> dict[str, str]:
    """`name: value` lines; a name that the system does not know is not among them."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs if name in _NAMES and value.isprintable()}


def _swap_used_bytes(values: Mapping[str, str]) -> int | None:
    if "vm.swapusage" not in values:
        return int(psutil.swap_memory().used)
    used = re.search(r"\bused = ([0-9]{1,9})[.,]([0-9]{2})([KMG])\b", values["vm.swapusage"])
    return int(float(f"{used[1]}.{used[2]}") * _UNIT_BYTES[used[3]]) if used else None
