"""`metal status` and `metal ps`: what the server is doing, on one screen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_metal.cli import printer
from vllm_metal.cli.table import table
from vllm_metal.errors import MetalError, ServiceError

if TYPE_CHECKING:
    from vllm_metal.client import Client
    from vllm_metal.service.status import Status

#: As service managers say that a service does not run.
_NOT_RUNNING = 3
_COLUMNS = ("MODEL", "STATE", "SIZE", "FORMAT", "DEVICE", "MODE", "CONTEXT", "IDLE", "UNLOADS")
_SERVABLE = ("ok", "unloaded")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Url = Annotated[
    str | None, typer.Option(help="Server to ask, `unix:/path` for a socket; else the configured one.")
]
ApiKey = Annotated[str | None, typer.Option(help="Key the server asks for.")]
ConfigPath = Annotated[Path | None, typer.Option(help="Configuration file to use.")]


def status(
    as_json: AsJson = False, url: Url = None, api_key: ApiKey = None, config: ConfigPath = None
) -> None:
    """Show the server, its models and requests, and the service.

    Exits with 3 unless a request would be served.
    """
    import dataclasses

    client = client_for(url, api_key, config)
    server, problem = _ask(client)
    service = _service()
    if as_json:
        told = {
            "url": client.url,
            "server": server,
            "problem": problem.message if problem else None,
            "service": dataclasses.asdict(service) if service else None,
        }
        printer.out(json.dumps(told, indent=2))
    else:
        for name, words in _rows(client.url, server, service):
            printer.out(f"{name:<10}{words}")
        if server:
            printer.out(f"\n{_table(server['models'])}")
        if problem:
            printer.note()
            printer.error(problem)
    if not server or not any(model["status"] in _SERVABLE for model in server["models"]):
        raise typer.Exit(_NOT_RUNNING)


def ps(as_json: AsJson = False, url: Url = None, api_key: ApiKey = None, config: ConfigPath = None) -> None:
    """List the server's models."""
    models = client_for(url, api_key, config).status()["models"]
    printer.out(json.dumps(models, indent=2) if as_json else _table(models))


def client_for(url: str | None, api_key: str | None, config: Path | None) -> Client:
    """Of what the options of a command that asks the server say."""
    from vllm_metal.client import client_of
    from vllm_metal.config import load

    return client_of(load(path=config).server, url, api_key)


def _ask(client: Client) -> tuple[dict[str, Any] | None, MetalError | None]:
    try:
        return client.status(), None
    except MetalError as exc:
        return None, exc


def _service() -> Status | None:
    """None where there is no launchd."""
    from vllm_metal.service import status

    try:
        return status.read()
    except ServiceError:
        return None


def _rows(url: str, server: dict[str, Any] | None, service: Status | None) -> Iterator[tuple[str, str]]:
    if server:
        up = duration(server["uptime_s"])
        yield "server", f"vllm-metal {server['version']} at {url}, pid {server['pid']}, up {up}"
        if server["restart_needed"]:
            yield "restart", "needed: another version is installed than the one that runs"
        yield "requests", f"{server['num_running']} running, {server['num_waiting']} waiting"
    else:
        yield "server", f"no status from {url}"
    if service:
        message, hint = service.problem or (f"healthy, pid {service.pid}", "")
        yield "service", f"{message}: {hint}" if hint else message


def _table(models: Sequence[dict[str, Any]]) -> str:
    """And below it why models are as they are, where that takes a sentence."""
    lines = [table(_COLUMNS, [_cells(model) for model in models])]
    lines += [f"{model['name']}: {model['detail']}" for model in models if model["detail"]]
    return "\n".join(lines)


def _cells(model: dict[str, Any]) -> tuple[str, ...]:
    from vllm_metal.hub.disk import format_bytes

    if model["size_bytes"] is None:
        return (model["name"], model["stage"], *["–"] * (len(_COLUMNS) - 2))
    return (
        model["name"],
        model["stage"],
        format_bytes(model["size_bytes"]),
        model["number_format"],
        model["device"],
        model["mode"],
        str(model["max_model_len"]),
        duration(model["idle_s"]) if model["idle_s"] else "no",
        _unloads(model),
    )


def _unloads(model: dict[str, Any]) -> str:
    if model.get("pinned"):
        return "pinned"
    seconds = model.get("unloads_in_s")
    return "never" if seconds is None else f"in {duration(seconds)}"


def is_loaded(model: Mapping[str, Any]) -> bool:
    """Whether the server has a model in memory, or is about to."""
    return model["status"] not in ("failed", "unloaded")


def duration(seconds: float) -> str:
    """In the two largest units: `2 h 5 min`."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = {"d": days, "h": hours, "min": minutes, "s": whole_seconds}
    named = [f"{count} {unit}" for unit, count in parts.items() if count]
    return " ".join(named[:2]) or "0 s"
