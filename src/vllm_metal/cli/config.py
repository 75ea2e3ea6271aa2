"""`metal config`: show, find, write, change and check the config file."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from vllm_metal import config
from vllm_metal.cli import printer
from vllm_metal.errors import ConfigError
from vllm_metal.toml_document import TomlDocument

app = typer.Typer(no_args_is_help=True, help="Show or change the configuration.")

ConfigPath = Annotated[
    Path | None, typer.Option("--config", metavar="PATH", help="Config file.", show_default=False)
]


@app.command()
def show(
    path: ConfigPath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every value and who set it."""
    loaded = config.load(path=path)
    if as_json:
        rows = {
            key: {"value": each.public(loaded.value(key)), "origin": loaded.origins[key].text}
            for key, each in config.SETTINGS.items()
        }
        printer.out(json.dumps(rows, indent=2))
        return
    texts = {key: each.text(loaded.value(key)) for key, each in config.SETTINGS.items()}
    key_width, text_width = max(map(len, texts)), max(map(len, texts.values()))
    for key, text in texts.items():
        printer.out(f"{key:<{key_width}}  {text:<{text_width}}  {loaded.origins[key].text}")


@app.command("path")
def print_path(path: ConfigPath = None) -> None:
    """Print where the config file is."""
    printer.out(str(config.locate(path)))


@app.command()
def init(
    path: ConfigPath = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a config file with every setting commented out."""
    file = config.locate(path)
    if file.exists() and not force:
        raise ConfigError(f"`{file}` exists already", hint="`--force` overwrites it")
    _write(file, config.default_file().encode())
    printer.note(f"wrote `{file}`")


@app.command("set")
def set_value(
    key: Annotated[str, typer.Argument(metavar="KEY", help="As in `server.port`.", show_default=False)],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Lists take commas.", show_default=False)],
    path: ConfigPath = None,
) -> None:
    """Set KEY in the config file, all else kept as it is."""
    file = config.locate(path)
    known = config.find(key)
    checked = known.check(known.read(value), f"`{key}`")
    try:
        document = config.read(file)
    except FileNotFoundError:
        document = TomlDocument("")
    try:
        text = document.with_value(known.section, known.name, checked, default=known.example)
        content = text.encode()
    except ValueError as exc:
        raise ConfigError(f"cannot set `{key}` in `{file}`: {exc}", hint="edit the file by hand") from exc
    _write(file, content)
    printer.note(f"set `{key}` to {known.text(checked)} in `{file}`")


@app.command()
def check(path: ConfigPath = None) -> None:
    """Check the config file and the environment."""
    config.load(path=path)
    file = config.locate(path)
    printer.out(f"ok: {file}" if file.exists() else f"ok: no file at {file}")


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; links and modes stay. A new file is its owner's alone, since it may hold keys."""
    target = Path(os.path.realpath(path))
    # A pipe or a device would be replaced by a file; a folder is safe from that.
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ConfigError(f"cannot write `{path}`: it is not a file", hint="name a file with `--config`")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if target.exists():
                    temporary.chmod(stat.S_IMODE(target.stat().st_mode))
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot write `{path}`: {exc.strerror}", hint="see who owns its folder") from exc
