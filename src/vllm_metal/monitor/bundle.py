"""A zip file for a bug report: findings, settings, versions and the end of the log. No prompts, no keys."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from vllm_metal.errors import MetalError
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings
from vllm_metal.service import launchd, log_tail

_NUM_LOG_LINES = 1000
# The last is the password of a URL, as of a proxy.
_TOKEN = re.compile(r"""\b(?:hf_|sk-)[A-Za-z0-9_-]{8,}|(?<=Bearer )[^\s"`]+|(?<=://)[^\s/@"]+(?=@)""")
_SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "METAL_SERVER_API_KEYS")


def write(path: Path, surroundings: Surroundings, findings: Iterable[Finding]) -> None:
    """Raises MetalError for a file that is there already, or cannot be written."""
    members = [
        (name, _without_secrets(text, surroundings)) for name, text in _members(surroundings, findings)
    ]
    try:
        # A report is its writer's own until it is sent.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in members:
                archive.writestr(name, text)
    except FileExistsError:
        raise MetalError(f"`{path}` exists already", hint="name another file, or remove it") from None
    except OSError as exc:
        raise MetalError(f"cannot write `{path}`: {exc.strerror}", hint="name a file elsewhere") from exc


def _members(surroundings: Surroundings, findings: Iterable[Finding]) -> Iterator[tuple[str, str]]:
    yield "doctor.json", _json([asdict(finding) for finding in findings])
    loaded = surroundings.config
    yield (
        "config.json",
        _json(
            {
                each.key: {"value": each.public(value), "origin": origin.text}
                for each, value, origin in loaded.all_values()
            }
        ),
    )
    packages = sorted({(each.name, each.version) for each in metadata.distributions()})
    machine = {"python": sys.version, "platform": platform.platform(), "host": asdict(surroundings.host)}
    yield "versions.json", _json({**machine, "packages": dict(packages)})
    for name, ask in (
        ("status.json", surroundings.client.status),
        ("metrics.txt", surroundings.client.metrics),
    ):
        try:
            told = ask()
        except MetalError as exc:
            told = exc.message
        yield name, told if isinstance(told, str) else _json(told)
    log = Path(loaded.log.file) if loaded.log.file else launchd.log_file()
    for file in (log, launchd.stdio_file()):
        try:
            yield file.name, log_tail.tail(file, _NUM_LOG_LINES)
        except MetalError as exc:
            yield file.name, exc.message


def _without_secrets(text: str, surroundings: Surroundings) -> str:
    """`text` without keys, wherever they come from, and with `~` for the home."""
    keys = {*surroundings.config.server.api_keys}
    for variable in _SECRET_VARIABLES:
        keys |= {key.strip() for key in os.environ.get(variable, "").split(",")}
    for key in sorted(filter(None, keys), key=len, reverse=True):
        text = text.replace(key, "***")
    text, home = _TOKEN.sub("***", text), Path.home()
    # Without a name it is in every path.
    return text.replace(str(home), "~") if home.name else text


def _json(value: object) -> str:
    return json.dumps(value, indent=2, default=str) + "\n"
