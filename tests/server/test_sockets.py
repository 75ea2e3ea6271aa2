"""Sockets that are taken, stale or impossible."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from vllm_metal.errors import ConfigError, PortInUse
from vllm_metal.server import sockets
from vllm_metal.settings import ServerConfig


def test_a_taken_port_names_its_holder_and_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse) as caught:
            sockets.bind(ServerConfig(port=port))
    assert caught.value.message.startswith(f"port {port} is used by `")
    assert caught.value.message.endswith(f"(pid {os.getpid()})")
    assert caught.value.hint == f"choose another with `--port {port + 1}`, for the service with `server.port`"


def test_a_port_taken_on_the_other_loopback_address_is_taken() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as holder, pytest.raises(PortInUse):
        sockets.bind(ServerConfig(port=holder.getsockname()[1]))


def test_any_free_port_is_the_same_on_both_addresses() -> None:
    bound = sockets.bind(ServerConfig(port=0))
    try:
        assert len({sock.getsockname()[1] for sock in bound}) == 1
        assert len(bound) == 2
    finally:
        for sock in bound:
            sock.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=f"`{host}` is not an address of this machine"):
        sockets.bind(ServerConfig(host=host, port=0))


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metal.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = ServerConfig(uds=str(path))
    bound = sockets.bind(server)
    assert path.is_socket()
    sockets.close(bound, server)
    assert not path.exists()


def test_a_unix_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metal.sock"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(PortInUse, match="is used by another server"):
            sockets.bind(ServerConfig(uds=str(path)))
    assert path.is_socket()


def test_a_file_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        sockets.bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "mine"


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    with pytest.raises(ConfigError, match="certificate"):
        sockets.ssl_context(ServerConfig(ssl_certfile=str(path)))
    path.write_text("not a certificate")
    with pytest.raises(ConfigError, match="certificate"):
        sockets.ssl_context(ServerConfig(ssl_certfile=str(path)))


@pytest.mark.parametrize(
    "asked",
    [{"ssl_keyfile": "key.pem"}, {"ssl_ca_certs": "authorities.pem"}, {"ssl_cert_reqs": 2}],
    ids=lambda asked: next(iter(asked)),
)
def test_tls_that_lacks_its_certificate_is_not_plain_http(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the certificate is missing"):
        sockets.ssl_context(ServerConfig(**asked))
