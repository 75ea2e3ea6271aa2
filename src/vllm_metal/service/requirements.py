"""What the product runs on: a lock file a system, with hashes.

They lie in the package, so that the launcher's copy and the venv's copy both have them.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.errors import SetupError
from vllm_metal.service import package

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 14)
_OLDEST_MACOS = 14
_LOCKS = {"darwin": "macos-arm64.lock", "linux": "linux.lock"}
_REQUIREMENT = re.compile(r"^([\w.-]+)(==\S+)(?: ; (.*?))? \\$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Lock:
    path: Path
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def requirements(self) -> tuple[str, ...]:
        """As a package's metadata states them: `numpy==2.4.6 ; python_full_version < "3.12"`."""
        return tuple(
            f"{name}{version}" + (f" ; {marker}" if marker else "")
            for name, version, marker in _REQUIREMENT.findall(self.text)
        )

    @property
    def num_packages(self) -> int:
        """One that Pythons need in different versions counts once."""
        return len({name for name, _, _ in _REQUIREMENT.findall(self.text)})


def lock() -> Lock:
    """The lock for this system. Raises SetupError where the product cannot run."""
    if not _OLDEST_PYTHON <= sys.version_info[:2] <= _NEWEST_PYTHON:
        raise SetupError(
            f"Python {platform.python_version()} is not supported",
            hint="run it with Python {}.{} to {}.{}".format(*_OLDEST_PYTHON, *_NEWEST_PYTHON),
        )
    if sys.platform not in _LOCKS:
        raise SetupError(f"`{sys.platform}` is not supported", hint="MLX runs on Apple Silicon and on Linux")
    if sys.platform == "darwin":
        _require_mac()
    path = package.FOLDER / "locks" / _LOCKS[sys.platform]
    return Lock(path, path.read_text(encoding="utf-8"))


def _require_mac() -> None:
    if platform.machine() != "arm64":
        if _sysctl("hw.optional.arm64") == "1":
            raise SetupError(
                f"`{sys.executable}` is an Intel Python, which Rosetta translates; MLX needs a native one",
                hint="install Homebrew's native Python: `/opt/homebrew/bin/brew install python@3.12`",
            )
        raise SetupError("this Mac has an Intel processor", hint="MLX needs Apple Silicon")
    # Not `platform.mac_ver`, which some Pythons are told a false version by.
    version = _sysctl("kern.osproductversion")
    if version and int(version.split(".")[0]) < _OLDEST_MACOS:
        raise SetupError(f"macOS {version} is too old", hint=f"MLX needs macOS {_OLDEST_MACOS} or later")


def _sysctl(name: str) -> str:
    """The value, or nothing where this machine does not know the name."""
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip()
