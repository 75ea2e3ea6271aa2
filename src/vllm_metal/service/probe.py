"""Asks the running daemon how it is, where the configuration that launchd leaves it says that it listens."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal import config
from vllm_metal.client import Client, server_url
from vllm_metal.errors import ConfigError, EngineUnavailable, MetalError, ServerUnreachable


@dataclass(frozen=True, slots=True)
class Answer:
    """`health` is "ok", "unavailable" (`detail` tells why), "no answer" or "unknown"."""

    url: str | None
    health: str
    detail: str | None = None
    pid: int | None = None
    version: str | None = None
    package_sha256: str | None = None
    restart_needed: bool = False


def ask() -> Answer:
    """What answers, which may be another server in the daemon's place. Never raises."""
    try:
        # Not by this shell's variables: launchd's daemon does not have them.
        server = config.load(environ={}).server
    except ConfigError as exc:
        return Answer(None, "unknown", exc.message)
    if not server.port and not server.uds:
        return Answer(None, "unknown", "`server.port` is 0, so nobody can tell where it listens")
    client = Client(server_url(server), next(iter(server.api_keys), None))
    try:
        version = client.version()
    except ServerUnreachable as exc:
        return Answer(client.url, "no answer", exc.message)
    except MetalError as exc:
        # The keys may have changed since it started.
        return Answer(client.url, "unknown", exc.message)
    health, detail = _health(client)
    return Answer(
        client.url,
        health,
        detail,
        version.get("pid"),
        version.get("version"),
        version.get("package_sha256"),
        bool(version.get("restart_needed")),
    )


def _health(client: Client) -> tuple[str, str | None]:
    try:
        client.health()
    except EngineUnavailable as exc:
        return "unavailable", exc.message
    except MetalError as exc:
        return "no answer", exc.message
    return "ok", None
