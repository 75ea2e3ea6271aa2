"""What the checks of `metal doctor` look at, gathered once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_metal import config
from vllm_metal.client import Client, client_of
from vllm_metal.config import Config
from vllm_metal.errors import ConfigError, MetalError
from vllm_metal.monitor import host
from vllm_metal.monitor.host import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`config` and `client` are the default ones where there is a `config_error`.

    `with_power` lets checks ask `sudo -n`, which logs a refusal.
    """

    host: Host
    config: Config
    config_error: ConfigError | None
    client: Client
    with_power: bool = False

    def serves(self) -> bool:
        """Whether the daemon is there, and takes requests."""
        try:
            return self.client.is_ours() and "status" in self.client.health()
        except MetalError:
            return False


def gather(
    path: Path | None = None, environ: Mapping[str, str] = os.environ, *, with_power: bool = False
) -> Surroundings:
    """Read the machine, and the configuration as `config.load` does; never raises for what is wrong there."""
    try:
        loaded = config.load(path=path, environ=environ)
        client, error = client_of(loaded.server), None
    except ConfigError as exc:
        loaded, client, error = Config(), Client(), exc
    return Surroundings(
        host=host.read(), config=loaded, config_error=error, client=client, with_power=with_power
    )
