"""The running package, and how a venv gets a copy of it: from here, never from an index."""

from __future__ import annotations

import functools
import hashlib
import shlex
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import vllm_metal
from vllm_metal import paths

FOLDER = Path(vllm_metal.__file__).parent

COMMANDS = ("metal", "vllm")
"""One program by two names: guides for vLLM-Metal say `vllm`."""

# Neither the length of the path nor a space in it may matter, as they do in a `#!` line of its own.
_SCRIPT = """#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
from vllm_metal.cli.main import main

main()
"""


@functools.cache
def sha256() -> str:
    """Of all files, the locks included: a development version changes without its number."""
    digest = hashlib.sha256()
    for path in _files():
        content = path.read_bytes()
        digest.update(f"{path.relative_to(FOLDER)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def install(venv: Path, requirements: Iterable[str]) -> None:
    """Copy the package into the venv, with its commands and metadata that ask for `requirements`."""
    site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
    for path in _files():
        copy = site_packages / path.relative_to(FOLDER.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Not all at once by `copytree`, which gathers what went wrong into pages of text.
        shutil.copyfile(path, copy)
    _write_metadata(site_packages / f"vllm_metal-{vllm_metal.__version__}.dist-info", requirements)
    for command in COMMANDS:
        script = venv / "bin" / command
        script.write_text(_SCRIPT.format(python=shlex.quote(str(venv / "bin/python"))), encoding="utf-8")
        script.chmod(0o755)


def _files() -> list[Path]:
    return [path for path in sorted(FOLDER.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def _write_metadata(folder: Path, requirements: Iterable[str]) -> None:
    """What pip and uv read of an installed package; without a list of files they leave its removal to us."""
    metadata = [("Metadata-Version", "2.1"), ("Name", paths.APP), ("Version", vllm_metal.__version__)]
    metadata += [("Requires-Dist", requirement) for requirement in requirements]
    wheel = [("Wheel-Version", "1.0"), ("Root-Is-Purelib", "true"), ("Tag", "py3-none-any")]
    folder.mkdir()
    for name, fields in (("METADATA", metadata), ("WHEEL", wheel)):
        text = "".join(f"{key}: {value}\n" for key, value in fields)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "INSTALLER").write_text("metal setup\n", encoding="utf-8")
