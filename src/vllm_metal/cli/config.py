"""`metal config`: show, find, write, change and check the config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vllm_metal import config, config_pages
from vllm_metal.cli import own_file, printer
from vllm_metal.errors import ConfigError, ModelNotFound
from vllm_metal.toml_document import TomlDocument, dotted

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
    values = config.load(path=path).all_values()
    if as_json:
        rows = {
            each.key: {"value": each.public(value), "origin": origin.text} for each, value, origin in values
        }
        printer.out(json.dumps(rows, indent=2))
        return
    texts = [(each.key, each.text(value), origin.text) for each, value, origin in values]
    key_width, text_width = (max(len(row[column]) for row in texts) for column in (0, 1))
    for key, text, origin_text in texts:
        printer.out(f"{key:<{key_width}}  {text:<{text_width}}  {origin_text}")


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
    own_file.write(file, config_pages.default_file().encode())
    printer.note(f"wrote `{file}`")


@app.command("set")
def set_value(
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="As in `server.port` or `models.NAME.ttl`.", show_default=False),
    ],
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
        text = document.with_value(known.table, known.name, checked, default=known.example)
        content = text.encode()
    except ValueError as exc:
        raise ConfigError(f"cannot set `{key}` in `{file}`: {exc}", hint="edit the file by hand") from exc
    own_file.write(file, content)
    printer.note(f"set `{key}` to {known.text(checked)} in `{file}`")


@app.command()
def check(path: ConfigPath = None) -> None:
    """Check the config file and the environment."""
    _warn_of_sections(config.load(path=path))
    file = config.locate(path)
    printer.out(f"ok: {file}" if file.exists() else f"ok: no file at {file}")


def _warn_of_sections(loaded: config.Config) -> None:
    """Of those that no model has by their name, as after a slip of the pen, and of a model's second one."""
    from vllm_metal.hub import names

    sections: dict[names.Source, str] = {}
    for name in loaded.model_sections:
        section = f"`[{dotted(('models', name))}]`"
        try:
            first = sections.setdefault(names.parse_source(name, loaded.models), section)
        except ModelNotFound as exc:
            printer.warning(f"{section} is of no model known here: {exc.hint}")
            continue
        if first != section:
            printer.warning(f"{section} does nothing: it is of the same model as {first}")
