"""`metal load` and `metal stop`: which models the running server holds in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from vllm_metal.cli import printer
from vllm_metal.cli.status import ApiKey, ConfigPath, Url, client_for, duration, is_loaded
from vllm_metal.cli.waiting import stage_of, telling


def load(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As `metal list` names it.", show_default=False)
    ],
    keep_alive: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long it may be idle: seconds, or as in `10m`; -1 for ever. Else as configured.",
        ),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    config: ConfigPath = None,
) -> None:
    """Have the server load a model, and wait until it is there."""
    _require_names(model)
    client = client_for(url, api_key, config)
    with telling(client, partial(stage_of, model)):
        loaded = client.load(model, keep_alive=_number_or_text(keep_alive))
    printer.note(f"`{loaded['name']}` is loaded and {_stay(loaded)}")


def stop(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="As `metal ps` names it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Unload every model.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    config: ConfigPath = None,
) -> None:
    """Have the server unload models, each once its running requests have ended.

    The server goes on, and loads a model again when a request asks for it.
    """
    if bool(models) == every:
        raise typer.BadParameter("name the models to unload, or give `--all`", param_hint="MODEL")
    _require_names(*models or ())
    client = client_for(url, api_key, config)
    names = models or [each["name"] for each in client.status()["models"] if is_loaded(each)]
    for name in names:
        with telling(client, partial(_requests_of, name)):
            unloaded = client.unload(name)
        printer.note(f"`{unloaded['name']}` is unloaded")
    if not names:
        printer.note("no model is loaded")


def _require_names(*models: str) -> None:
    """To the server an empty name means the default model, to a shell a variable that is not set."""
    if not all(map(str.strip, models)):
        raise typer.BadParameter("a model's name is empty", param_hint="MODEL")


def _number_or_text(time: str | None) -> float | str | None:
    """What the text means is the server's to say."""
    if time is None:
        return None
    try:
        return float(time)
    except ValueError:
        return time


def _stay(model: Mapping[str, Any]) -> str:
    if model.get("pinned"):
        return "pinned"
    seconds = model.get("unloads_in_s")
    if seconds == 0:
        return "goes as soon as it is idle"
    return "stays" if seconds is None else f"stays until it has been idle for {duration(round(seconds))}"


def _requests_of(name: str, models: Sequence[Mapping[str, Any]]) -> str | None:
    for each in models:
        if each["name"] == name and (count := each.get("num_running", 0) + each.get("num_waiting", 0)):
            return f"waiting for {count} request{'' if count == 1 else 's'} of `{name}` to end"
    return None
