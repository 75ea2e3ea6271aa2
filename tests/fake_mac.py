"""The tools of macOS that `metal` asks, as small programs in a folder to put on `PATH`."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

_SYSCTL = """
for name; do
    if [ -f "$here/sysctl.d/$name" ]; then
        read -r value <"$here/sysctl.d/$name"
        printf '%s: %s\\n' "$name" "$value"
    else echo "sysctl: unknown oid '$name'" >&2; missing=1; fi
done
exit ${missing:-0}
"""
# What macOS tells a program that was linked long ago, unless the variable forbids it.
_SW_VERS = """
[ "$1" = -productVersion ] || exit 64
case "$SYSTEM_VERSION_COMPAT" in
    0) cat "$here/version" ;;
    1) echo 10.16 ;;
    *) echo 16.0 ;;
esac
"""
_IOREG = """
[ "$*" = "-r -d 1 -w 0 -c IOAccelerator" ] || exit 64
cat "$here/ioreg.txt"
"""
_SUDO = """
[ "$1" = -n ] || exit 64
if [ -f "$here/refused" ]; then echo 'sudo: a password is required' >&2; exit 1; fi
shift
FAKE_ROOT=1 exec "$@"
"""
_POWERMETRICS = """
if [ -z "$FAKE_ROOT" ]; then echo 'powermetrics must be invoked as the superuser' >&2; exit 1; fi
cat "$here/powermetrics.txt"
"""
_MACMON = """
[ "$1 $2 $3 $4" = "pipe -s 1 -i" ] || exit 64
cat "$here/macmon.json"
"""
# What this project's programs that ask MLX print: `python -P -m MODULE`.
_PYTHON = """
[ "$1 $2" = "-P -m" ] || exit 64
exec sh "$here/${3##*.}.sh"
"""
_HEALTHY = {
    "machdep.cpu.brand_string": "Apple M4 Max",
    "hw.model": "Mac16,5",
    "hw.optional.arm64": "1",
    "sysctl.proc_translated": "0",
    "kern.osproductversion": "26.1",
    "kern.memorystatus_vm_pressure_level": "1",
    "vm.swapusage": "total = 2048.00M  used = 512.50M  free = 1535.50M  (encrypted)",
    "iogpu.wired_limit_mb": "0",
}


class FakeMac:
    """A healthy one with macOS 26.1, until a test says otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sysctl.d").mkdir(parents=True)
        for name, value in _HEALTHY.items():
            self.set(name, value)
        self.set_version("26.1")
        for name, script in {
            "sysctl": _SYSCTL,
            "sw_vers": _SW_VERS,
            "ioreg": _IOREG,
            "sudo": _SUDO,
            "powermetrics": _POWERMETRICS,
            "mlx_python": _PYTHON,
        }.items():
            self._install(name, script)
        self.tell("gpu_check", {"gpu": "Apple M4 Max", "difference": 1e-6})

    @property
    def path(self) -> str:
        return f"{self.folder}:{os.environ['PATH']}"

    def set(self, name: str, value: str | None) -> None:
        """What `sysctl` says of a name; None makes it unknown."""
        file = self.folder / "sysctl.d" / name
        file.unlink(missing_ok=True)
        if value is not None:
            file.write_text(value)

    def set_version(self, version: str) -> None:
        (self.folder / "version").write_text(f"{version}\n")
        self.set("kern.osproductversion", version)

    def show(self, *, ioreg: Path | None = None, powermetrics: Path | None = None) -> None:
        """What the GPU's programs print from now on."""
        if ioreg:
            (self.folder / "ioreg.txt").write_bytes(ioreg.read_bytes())
        if powermetrics:
            (self.folder / "powermetrics.txt").write_bytes(powermetrics.read_bytes())

    @property
    def mlx_python(self) -> str:
        """For `mlx_process.PYTHON`."""
        return str(self.folder / "mlx_python")

    def tell(self, program: str, told: dict[str, object]) -> None:
        """What a program that asks MLX says from now on."""
        self.run_instead(program, f"cat <<'END'\n{json.dumps(told)}\nEND\n")

    def run_instead(self, program: str, script: str) -> None:
        (self.folder / f"{program}.sh").write_text(script)

    def install_macmon(self, sample: Path) -> None:
        (self.folder / "macmon.json").write_bytes(sample.read_bytes())
        self._install("macmon", _MACMON)

    def refuse_sudo(self) -> None:
        (self.folder / "refused").touch()

    def _install(self, name: str, script: str) -> None:
        program = self.folder / name
        program.write_text(f'#!/bin/sh\nhere="${{0%/*}}"\n{script}')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
