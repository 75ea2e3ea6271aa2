"""The service's property list: made from the template, checked, read and written."""

from __future__ import annotations

import plistlib
import re
import stat
import string
from collections.abc import Callable
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import escape

from vllm_metal import paths
from vllm_metal.errors import ServiceError
from vllm_metal.service import launchd, whole_file
from vllm_metal.service.open_files import NUM_OPEN_FILES
from vllm_metal.settings import EXIT_TIMEOUT_S

_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"


def file() -> Path:
    """That of the user's service."""
    return paths.launch_agents_dir() / f"{launchd.LABEL}.plist"


def render(program: Path) -> bytes:
    """The plist that starts `program`, an absolute path of `metal`. Raises ServiceError."""
    template = resources.files("vllm_metal.service").joinpath(f"{launchd.LABEL}.plist.template").read_text()
    values = {
        "label": launchd.LABEL,
        "program": program,
        "path": f"{_tools(program)}:{_SYSTEM_PATH}",
        "venv": paths.venv(),
        "exit_timeout_s": EXIT_TIMEOUT_S,
        "num_open_files": NUM_OPEN_FILES,
        "stdio_file": launchd.stdio_file(),
    }
    text = string.Template(template).substitute({name: escape(str(each)) for name, each in values.items()})
    content = text.encode(errors="surrogateescape")
    check(content, file().name)
    return content


def _tools(program: Path) -> Path:
    """The folder of what is installed beside `program`; Homebrew links it all into one."""
    prefix, opt, _ = str(program).partition("/opt/vllm-metal/")
    return Path(prefix) / "bin" if opt else program.parent


def read(path: Path) -> dict[str, Any]:
    """The entries of a plist that anybody may have written; empty where it is not one."""
    try:
        entries = plistlib.loads(path.read_bytes())
    except (OSError, ValueError, expat.ExpatError, AttributeError, IndexError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def stdio_file(entries: dict[str, Any]) -> Path:
    """Where the service's standard error goes."""
    named = entries.get("StandardErrorPath")
    return Path(named) if isinstance(named, str) else launchd.stdio_file()


def is_written(content: bytes) -> bool:
    """Whether the user's plist is `content` to the byte, and hers alone to change, or launchd refuses it."""
    try:
        others_may_write = file().stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return not others_may_write and file().read_bytes() == content
    except OSError:
        return False


def write(content: bytes) -> None:
    """Replace the user's plist. Raises ServiceError."""
    try:
        whole_file.write(file(), content)
    except OSError as exc:
        raise ServiceError(
            f"cannot write `{file()}`: {exc.strerror}", hint=f"see `ls -ld '{file().parent}' '{file()}'`"
        ) from exc


def is_from_brew(entries: dict[str, Any]) -> bool:
    """Homebrew starts programs of its `opt` folder, in every type of session."""
    arguments, sessions = entries.get("ProgramArguments"), entries.get("LimitLoadToSessionType")
    return (
        isinstance(arguments, list)
        and any(isinstance(each, str) and "/opt/vllm-metal/" in each for each in arguments)
        and isinstance(sessions, list)
        and {"LoginWindow", "StandardIO", "System"} <= {str(each) for each in sessions}
    )


def check(content: bytes, name: str) -> None:
    """Raises ServiceError if launchd would refuse or misread what is to be written as `name`."""
    if problem := _problem(content, name):
        raise ServiceError(f"`{name}` would not be a valid plist: {problem}")


def _problem(content: bytes, name: str) -> str | None:
    try:
        repeated = _repeated_key(content)
        entries = plistlib.loads(content)
    except (ValueError, expat.ExpatError) as exc:
        return str(exc)
    if repeated:
        return f"`{repeated}` stands twice"
    if not isinstance(entries, dict):
        return "it is not a dictionary"
    if missing := _SCHEMA.keys() - entries.keys():
        return f"`{min(missing)}` is missing"
    for key, value in entries.items():
        if key not in _SCHEMA:
            return f"`{key}` is not known"
        if not _SCHEMA[key](value):
            return f"`{key}` cannot be {value!r}"
    if name != f"{entries['Label']}.plist":
        return f"its label is `{entries['Label']}`"
    return None


def _repeated_key(content: bytes) -> str | None:
    """A key that one dictionary has twice, of which launchd and plistlib would drop one."""
    repeated: list[str] = []
    keys: list[set[str]] = []
    text: list[str] = []

    def start(tag: str, _: object) -> None:
        text.clear()
        if tag == "dict":
            keys.append(set())

    def end(tag: str) -> None:
        if tag == "dict":
            keys.pop()
        elif tag == "key" and keys:
            key = "".join(text)
            if key in keys[-1]:
                repeated.append(key)
            keys[-1].add(key)

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text.append
    parser.Parse(content, True)
    return repeated[0] if repeated else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_absolute(value: object) -> bool:
    # A `~` or a variable would be taken as it stands.
    return isinstance(value, str) and PurePosixPath(value).is_absolute() and ".." not in value.split("/")


def _is_command(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value)) and _is_absolute(value[0])


def _one_of(*values: str) -> Callable[[object], bool]:
    return lambda value: value in values


def _list_of(*values: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(each in values for each in value)


def _dict_of(**checks: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, dict)
        and value.keys() <= checks.keys()
        and all(checks[key](each) for key, each in value.items())
    )


def _is_search_path(value: object) -> bool:
    return isinstance(value, str) and all(_is_absolute(folder) for folder in value.split(":"))


_SCHEMA: dict[str, Callable[[object], bool]] = {
    "Label": lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w.-]+", value)),
    "ProgramArguments": _is_command,
    "RunAtLoad": _is_boolean,
    "KeepAlive": _dict_of(SuccessfulExit=_is_boolean),
    "ThrottleInterval": _is_count,
    "ExitTimeOut": _is_count,
    "ProcessType": _one_of("Interactive"),
    "LimitLoadToSessionType": _list_of("Aqua", "Background"),
    "EnvironmentVariables": _dict_of(PATH=_is_search_path, VLLM_METAL_VENV=_is_absolute),
    "SoftResourceLimits": _dict_of(NumberOfFiles=_is_count),
    "StandardOutPath": _is_absolute,
    "StandardErrorPath": _is_absolute,
}
