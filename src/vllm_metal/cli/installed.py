"""`metal list` and `metal rm`: the models on this machine."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_metal.cli import consent, printer
from vllm_metal.cli.status import duration, is_loaded
from vllm_metal.cli.table import table
from vllm_metal.errors import MetalError, ModelError, ServerUnreachable

if TYPE_CHECKING:
    from vllm_metal.client import Client
    from vllm_metal.config import Config
    from vllm_metal.hub.installed import InstalledModel

_COLUMNS = ("MODEL", "KIND", "SIZE", "FORMAT", "CONTEXT", "LAST USED", "FROM")
_KNOWN_COLUMNS = ("MODEL", "FOR", "SIZE", "NEEDS", "REPOSITORY")

ConfigPath = Annotated[Path | None, typer.Option(metavar="PATH", help="Read this configuration file.")]


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with paths.")] = False,
    known: Annotated[
        bool, typer.Option("--known", help="List the well-known models that have short names instead.")
    ] = False,
    config: ConfigPath = None,
) -> None:
    """List the models on this machine, also those of LM Studio and Ollama.

    Each can be served by the name it is listed with.
    """
    from vllm_metal import config as configuration

    if known:
        _list_known(as_json)
        return
    from vllm_metal.client import client_of
    from vllm_metal.hub.installed import installed_models

    loaded_config = configuration.load(path=config)
    models = installed_models(loaded_config.models.store)
    try:
        in_memory = _loaded_names(client_of(loaded_config.server))
    except MetalError:
        in_memory = {}
    if as_json:
        rows = [_told(model) | {"loaded": str(model.path) in in_memory} for model in models]
        printer.out(json.dumps(rows, indent=2))
    elif models:
        printer.out(table(_COLUMNS, [_cells(model, str(model.path) in in_memory) for model in models]))
    else:
        printer.note("no models here yet; `metal list --known` shows some that `metal pull` can fetch")


def remove(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As `metal list` names it.", show_default=False)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigPath = None,
) -> None:
    """Delete a model from this machine.

    Models that the server has loaded stay, and so do those of other programs.
    """
    from vllm_metal import config as configuration
    from vllm_metal.hub import installed, removal
    from vllm_metal.hub.disk import format_bytes

    loaded = configuration.load(path=config)
    models_dir = loaded.models.store
    found = installed.find(model, loaded.models)
    removal.require_ours(found, models_dir)
    _require_unused(found, loaded)
    printer.note(f"`{found.name}`, {format_bytes(found.size_bytes)}, at {found.path}")
    if not (yes or consent.agrees("metal rm")):
        printer.note("nothing was removed")
        return
    removal.remove(found, models_dir)
    printer.note("removed")


def _list_known(as_json: bool) -> None:
    from vllm_metal.hub.catalogue import known_models

    models = known_models().values()
    if as_json:
        printer.out(json.dumps([asdict(model) for model in models], indent=2))
        return
    rows: Sequence[Sequence[str]] = [
        (each.name, each.kind, f"{each.size_gb:g} GB", f"{each.needs_gb} GB", each.repo) for each in models
    ]
    printer.out(table(_KNOWN_COLUMNS, rows))


def _told(model: InstalledModel) -> dict[str, object]:
    told = asdict(model)
    del told["files"]
    return told | {"path": str(model.path)}


def _cells(model: InstalledModel, is_in_memory: bool) -> Sequence[str]:
    from vllm_metal.hub.disk import format_bytes

    if is_in_memory:
        last_used = "loaded now"
    elif model.last_used is None:
        last_used = "never"
    else:
        last_used = f"{duration(max(0, time.time() - model.last_used))} ago"
    return (
        model.name,
        model.kind,
        format_bytes(model.size_bytes),
        model.number_format or "–",
        str(model.context_length or "–"),
        last_used,
        model.origin,
    )


def _require_unused(model: InstalledModel, config: Config) -> None:
    """Ask the server, if one runs."""
    from vllm_metal.client import client_of

    client = client_of(config.server)
    try:
        in_memory = _loaded_names(client)
    except ServerUnreachable:
        return
    if name := in_memory.get(str(model.path)):
        raise ModelError(
            f"`{model.name}` is loaded by the server at {client.url}",
            hint=f"run `metal stop {shlex.quote(name)}` first",
        )


def _loaded_names(client: Client) -> dict[str, str]:
    """Of the models that the server has in memory, by their paths."""
    return {
        each["path"]: each["name"]
        for each in client.status()["models"]
        if is_loaded(each) and each.get("path")
    }
