"""The sockets the server listens on, and who holds a port that is taken."""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path

from vllm_metal.errors import ConfigError, MetalError, PortInUse
from vllm_metal.settings import ServerConfig

_Address = tuple[str, int]

_LOOPBACK = ("127.0.0.1", "::1")
_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}


def bind(server: ServerConfig) -> list[socket.socket]:
    """Raises PortInUse or ConfigError."""
    if server.uds:
        return [_bind_unix(Path(server.uds))]
    if server.host not in ("localhost", _LOOPBACK[0]):
        return [_bind_tcp(family, address) for family, address in _addresses(server.host, server.port)]
    return _bind_loopback(server.port)


def close(bound: list[socket.socket], server: ServerConfig) -> None:
    for sock in bound:
        sock.close()
    if server.uds:
        Path(server.uds).unlink(missing_ok=True)


def url(sock: socket.socket, *, tls: bool) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def ssl_context(server: ServerConfig) -> ssl.SSLContext | None:
    """None for plain HTTP. Raises ConfigError when a certificate or key is missing or cannot be used."""
    if not server.ssl_certfile:
        if server.ssl_keyfile or server.ssl_ca_certs or server.ssl_cert_reqs:
            raise ConfigError(
                "TLS is set up in part: the certificate is missing",
                hint="name its file with `--ssl-certfile`",
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile or None)
        if server.ssl_ca_certs:
            context.load_verify_locations(server.ssl_ca_certs)
    except OSError as exc:
        raise ConfigError(
            f"the TLS certificate or key cannot be used: {exc.strerror or exc}",
            hint="check `server.ssl_certfile`, `server.ssl_keyfile` and `server.ssl_ca_certs`",
        ) from exc
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    return context


def _bind_loopback(port: int) -> list[socket.socket]:
    """Both families, since `localhost` may mean either; a machine without IPv6 does with one."""
    bound = [_bind_tcp(socket.AF_INET, (_LOOPBACK[0], port))]
    chosen_port = bound[0].getsockname()[1]
    try:
        bound.append(_bind_tcp(socket.AF_INET6, (_LOOPBACK[1], chosen_port)))
    except PortInUse:
        bound[0].close()
        if port == 0:
            return _bind_loopback(port)
        raise
    except ConfigError:
        pass
    return bound


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, _Address]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ConfigError(
            f"`{host}` is not an address of this machine: {exc.strerror}",
            hint="`--host 0.0.0.0` listens on all, `--host 127.0.0.1` on this machine only",
        ) from exc
    return [(family, (str(address[0]), port)) for family, _, _, _, address in found]


def _bind_tcp(family: socket.AddressFamily, address: _Address) -> socket.socket:
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"this machine has no {family.name}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        # Linux lets two sockets bind and refuses the second to listen.
        sock.listen()
    except OSError as exc:
        sock.close()
        raise _bind_error(exc, *address) from exc
    sock.setblocking(False)
    return sock


def _bind_error(exc: OSError, host: str, port: int) -> MetalError:
    if exc.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} is used by {_holder(port) or 'another program'}",
            hint=f"choose another with `--port {port + 1}`, for the service with `server.port`",
        )
    if exc.errno in _NO_SUCH_ADDRESS:
        return ConfigError(
            f"`{host}` is not an address of this machine",
            hint="`--host 0.0.0.0` listens on all, `--host 127.0.0.1` on this machine only",
        )
    return ConfigError(f"cannot listen on {host}, port {port}: {exc.strerror}")


def _holder(port: int) -> str | None:
    """The process that listens on `port`, if this user may know."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return f"`{process.name()}` (pid {process.pid})"
    return None


def _bind_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on `{path}`: {exc.strerror or exc}",
            hint="choose a short path, in a folder that exists and is yours, with `--uds`",
        ) from exc
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that a dead server left. Raises PortInUse or ConfigError for anything else."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # Nothing there, or nothing to be seen: binding will tell.
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"`{path}` is there already and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise PortInUse(
        f"`{path}` is used by another server",
        hint="choose another with `--uds`, for the service with `server.uds`",
    )
