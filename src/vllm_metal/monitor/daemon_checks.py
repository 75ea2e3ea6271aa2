"""Checks of the running daemon, over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

from vllm_metal.config import ServerConfig
from vllm_metal.errors import EngineUnavailable, MetalError
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings

_CONNECT_TIMEOUT_S = 2.0


def daemon(surroundings: Surroundings) -> Iterator[Finding]:
    """Who answers where the daemon should, and whether it is well."""
    client, server = surroundings.client, surroundings.config.server
    if not server.port and not server.uds:
        yield Finding("skipped", "daemon", "`server.port` is 0, so nobody can tell where it listens")
        return
    where = f"`{server.uds}`" if server.uds else f"port {server.port}"
    try:
        # An empty answer is that of another server: ours tells its state.
        is_ours = "status" in client.health()
        failure: MetalError | None = None
    except EngineUnavailable as exc:
        is_ours, failure = True, exc
    except MetalError as exc:
        is_ours, failure = False, exc
    if is_ours:
        yield Finding("ok", "port", f"the daemon has {where}")
        if failure is None:
            yield Finding("ok", "daemon", f"answers at {client.url}, healthy")
        else:
            yield Finding(
                "warning",
                "daemon",
                f"answers at {client.url}, but takes no requests: {failure.message}",
                why="requests wait, or are refused, until that is over",
                hint="see `metal service logs`",
            )
        return
    is_taken = _is_taken(server)
    # A certificate of one's own keeps a client from learning who answers.
    if is_taken and not (failure and server.ssl_certfile):
        names_it = f"`lsof {server.uds}`" if server.uds else f"`lsof -nP -iTCP:{server.port} -sTCP:LISTEN`"
        yield Finding(
            "problem",
            "port",
            f"{where} is taken by another program",
            why="the daemon cannot listen there",
            hint=f"{names_it} names it; end it, or change `server.{'uds' if server.uds else 'port'}`",
        )
        return
    if not is_taken:
        yield Finding("ok", "port", f"{where} is free")
    yield Finding(
        "warning",
        "daemon",
        failure.message if failure else f"nothing of vllm-metal answers at {client.url}",
        why="nothing serves models here",
        hint=(failure.hint if failure and failure.hint else "start it with `metal serve`"),
    )


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
