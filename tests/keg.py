"""The product as Homebrew installs it: sources without packages and a `metal` that a bare Python runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pip

import vllm_metal
from vllm_metal.service.venv import Stamp

PYTHON = str(Path(sys.executable).resolve())

_SYSTEM_PATH = "/usr/bin:/bin"

_LAUNCHER = """#!/bin/sh
'''exec' "{python}" -I -S "$0" "$@"
' '''
import sys

sys.path.insert(0, "{libexec}")

from vllm_metal.cli.launcher import main

main()
"""

#: Stands in for all that needs packages: says where it runs and as what, and ends with its input.
_FULL_PROGRAM = """
import sys

from vllm_metal import __version__
from vllm_metal.cli import launcher, program


def main():
    if "--version" in sys.argv:
        print(f"vllm-metal {__version__}")
    elif sys.argv[1] == "setup":
        program.run(lambda: launcher.launch(sys.argv[1:]))
    else:
        print(sys.prefix, sys.argv, flush=True)
        sys.stdin.read()
"""


class Keg:
    """`metal` runs with a home of its own in `folder`, and finds no `uv`."""

    def __init__(self, folder: Path) -> None:
        self.metal = folder / "keg/bin/metal"
        self.package = folder / "keg/libexec/vllm_metal"
        self.home = folder / "home"
        self.venv = self.home / ".venv-vllm-metal"
        self.versions = self.home / ".venv-vllm-metal.d"
        self.home.mkdir()
        self.metal.parent.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(vllm_metal.__file__).parent, self.package, ignore=ignored)
        self.metal.write_text(_LAUNCHER.format(python=PYTHON, libexec=self.package.parent))
        self.metal.chmod(0o755)
        self.env = {**os.environ, "HOME": str(self.home), "PATH": _SYSTEM_PATH, "NO_COLOR": "1"}

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.metal, *arguments],
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [self.metal, *arguments], env=self.env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def version_names(self) -> set[str]:
        return {path.name for path in self.versions.iterdir() if path.is_dir()}


#: `uv pip VERB --python PYTHON …`, by pip. Spares the time that it takes to put pip into a venv, and to start
#: pip twice, as its own `--python` does.
_UV = f"""#!/bin/sh
verb=$2 python=$4
shift 4
exec "$python" -I "{Path(pip.__file__).with_name("__pip-runner__.py")}" "$verb" "$@"
"""


class TinyKeg(Keg):
    """Asks for two small packages, which lie in a folder, and has a stub for what would need the rest."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.add_uv(_UV)
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        (self.package / "cli/main.py").write_text(_FULL_PROGRAM)
        self.lock(
            [
                make_wheel(self.wheels, "mlx", {"mlx/__init__.py": "", "mlx/core.py": ""}),
                make_wheel(self.wheels, "tiny", {"tiny.py": ""}),
            ]
        )
        # The user's own settings must not lead to an index.
        self.env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}

    def add_uv(self, script: str) -> None:
        uv = self.home.with_name("tools") / "uv"
        uv.parent.mkdir(exist_ok=True)
        uv.write_text(script)
        uv.chmod(0o755)
        self.env["PATH"] = f"{uv.parent}:{_SYSTEM_PATH}"

    def remove_uv(self) -> None:
        self.env["PATH"] = _SYSTEM_PATH

    def lock(self, wheels: list[Path]) -> None:
        text = ""
        for wheel in wheels:
            name, version, *_ = wheel.name.split("-")
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            text += f"{name}=={version} ; python_version >= '3' \\\n    --hash=sha256:{digest}\n"
        for path in (self.package / "locks").iterdir():
            path.write_text(text)

    def change_version(self, version: str) -> None:
        """As an upgrade does."""
        (self.package / "__init__.py").write_text(f'__version__ = "{version}"\n')


def stamp(version: Path, **known: str) -> None:
    """Have `version` be one that `metal setup` has finished."""
    Stamp(**dict.fromkeys((field.name for field in fields(Stamp)), "") | known).write(version)


def make_wheel(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """A wheel of version 1.0 with `files`."""
    metadata = f"{name}-1.0.dist-info"
    contents = {
        **files,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{metadata}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{metadata}/RECORD"])
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel
