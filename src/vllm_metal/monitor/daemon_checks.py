"""Checks of the running daemon, over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

from vllm_metal.client import Client
from vllm_metal.errors import MetalError
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings
from vllm_metal.settings import ServerConfig

_CONNECT_TIMEOUT_S = 2.0


def daemon(surroundings: Surroundings) -> Iterator[Finding]:
    """Who answers where the daemon should, and whether it is well."""
    client, server = surroundings.client, surroundings.config.server
    if not server.port and not server.uds:
        yield Finding("skipped", "daemon", "`server.port` is 0, so nobody can tell where it listens")
        return
    where = f"`{server.uds}`" if server.uds else f"port {server.port}"
    try:
        is_ours = client.is_ours()
    except MetalError as exc:
        yield from _silence(exc, where, server)
        return
    if is_ours:
        yield Finding("ok", "port", f"the daemon has {where}")
        yield _health(client)
    else:
        yield Finding(
            "problem",
            "port",
            f"{where} is taken by another program",
            why="the daemon cannot listen there",
            hint=f"{_whose(server)} names it; end it, or change {_key(server)}",
        )


def _health(client: Client) -> Finding:
    try:
        client.health()
    except MetalError as exc:
        return Finding(
            "warning",
            "daemon",
            f"answers at {client.url}, but takes no requests: {exc.message}",
            why="requests wait, or are refused, until that is over",
            hint="see `metal service logs`",
        )
    return Finding("ok", "daemon", f"answers at {client.url}, healthy")


def _silence(failure: MetalError, where: str, server: ServerConfig) -> Iterator[Finding]:
    is_taken = _is_taken(server)
    # A certificate of one's own keeps a client from learning who answers.
    if is_taken and not server.ssl_certfile:
        yield Finding(
            "problem",
            "port",
            f"{where} is taken, and nothing tells by whom: {failure.message}",
            why="a daemon that hangs serves nothing, and where another program listens it cannot",
            hint=f"{_whose(server)} names it; restart it if it is `metal`, "
            f"else end it or change {_key(server)}",
        )
        return
    if not is_taken:
        yield Finding("ok", "port", f"{where} is free")
    yield Finding(
        "warning",
        "daemon",
        failure.message,
        why="nothing serves models here",
        hint=failure.hint or "start it with `metal serve`",
    )


def _whose(server: ServerConfig) -> str:
    return f"`lsof {server.uds}`" if server.uds else f"`lsof -nP -iTCP:{server.port} -sTCP:LISTEN`"


def _key(server: ServerConfig) -> str:
    return "`server.uds`" if server.uds else "`server.port`"


def _is_taken(server: ServerConfig) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    with suppress(OSError):
        if server.uds:
            with socket.socket(socket.AF_UNIX) as unix:
                unix.settimeout(_CONNECT_TIMEOUT_S)
                unix.connect(server.uds)
                return True
        with socket.create_connection((host, server.port), _CONNECT_TIMEOUT_S):
            return True
    return False
