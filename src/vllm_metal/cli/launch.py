"""`metal launch`: start a coding agent against the running server."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vllm_metal import paths
from vllm_metal.agents.agent import Agent, Target, Variables
from vllm_metal.agents.known import AGENTS, find
from vllm_metal.agents.merging import merged
from vllm_metal.cli import own_file, printer
from vllm_metal.cli.table import table
from vllm_metal.errors import ConfigError, MetalError, ModelNotFound


def launch(
    name: Annotated[
        str | None, typer.Argument(metavar="[AGENT]", help="As `--list` names it.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]...", help="What the agent itself is to get.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to use; the server's default when left out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command, the key in it included, and start nothing.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Start nothing: change the agent's own settings for good, and keep a backup."
        ),
    ] = False,
    list_agents: Annotated[bool, typer.Option("--list", help="List the agents.")] = False,
    url: Annotated[str | None, typer.Option(help="Server to use; else the configured one.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key the server asks for.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file to use.")] = None,
) -> None:
    """Start a coding agent that uses the running server.

    For this one run: the agent's own settings stay as they are, unless `--write` is given.
    """
    if list_agents:
        rows = [(each.name, _state(each)) for each in AGENTS.values()]
        printer.out(table(("AGENT", "PROGRAM"), rows))
        return
    if name is None:
        raise typer.BadParameter("name one of those that `--list` shows", param_hint="AGENT")
    agent = find(name)
    if agent is None:
        raise MetalError(f"`{name}` is not a known agent", hint=f"known: {', '.join(AGENTS)}")
    target = _target(url, api_key, model, config)
    if target.max_model_len is None:
        printer.warning(
            f"the server does not tell how long the context of `{target.model}` is, so the agent assumes a "
            "size; if the model is still being loaded, start again when `metal ps` shows it"
        )
    if write:
        _write(agent, target)
        return
    start = agent.start(target, _run_folder(target))
    command = [agent.program, *start.arguments, *(arguments or ())]
    variables = {**start.variables, **_trust()}
    if dry_run:
        _show(command, variables, start.files)
    else:
        _become(agent, command, variables, start.files)


def _state(agent: Agent) -> str:
    return shutil.which(agent.program) or f"not installed: {agent.install}"


def _target(url: str | None, api_key: str | None, model: str | None, config: Path | None) -> Target:
    """Raises MetalError where nothing answers, or the model is not served."""
    from vllm_metal.client import client_of
    from vllm_metal.config import load

    client = client_of(load(path=config).server, url, api_key)
    if client.url.startswith("unix:"):
        raise ConfigError(
            f"the server listens on a socket, and agents need a port: `{client.url}`",
            hint="unset `server.uds`, or name a server with `--url`",
        )
    served = client.models()
    if not served:
        raise ModelNotFound(f"the server at {client.url} serves no model", hint="see `metal status`")
    try:
        # The default one comes first.
        told = client.model(model) if model else served[0]
    except ModelNotFound as exc:
        names = ", ".join(f"`{each['id']}`" for each in served)
        raise ModelNotFound(exc.message, hint=f"served: {names}") from exc
    return Target(client.url, told["id"], client.api_key, told.get("max_model_len"))


def _run_folder(target: Target) -> Path:
    """Runs with the same target share their files, which are the same then."""
    return paths.cache_dir() / "agents" / hashlib.sha256(repr(target).encode()).hexdigest()[:16]


def _show(command: list[str], variables: Variables, files: Mapping[Path, str]) -> None:
    for file, text in files.items():
        printer.note(f"in `{file}`:\n{text}")
    removed = [word for name, value in variables.items() if value is None for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in variables.items() if value is not None]
    env = ["env", *removed, *changed] if variables else []
    printer.out(shlex.join([*env, *command]))


def _become(agent: Agent, command: list[str], variables: Variables, files: Mapping[Path, str]) -> NoReturn:
    """Its signals and its terminal are its own."""
    program = shutil.which(agent.program)
    if program is None:
        raise MetalError(f"`{agent.program}` is not installed", hint=f"install it: `{agent.install}`")
    for file, text in files.items():
        own_file.write(file, text.encode())
    env = {**os.environ, **variables}
    os.execve(program, command, {name: value for name, value in env.items() if value is not None})


def _trust() -> dict[str, str]:
    """Node looks for certificates elsewhere than everybody else."""
    trusted = os.environ.get("SSL_CERT_FILE")
    return {"NODE_EXTRA_CA_CERTS": trusted} if trusted and "NODE_EXTRA_CA_CERTS" not in os.environ else {}


def _write(agent: Agent, target: Target) -> None:
    if agent.settings is None:
        raise MetalError(
            f"the settings of `{agent.name}` are not for others to write",
            hint=f"start it with `metal launch {agent.name}`",
        )
    settings = agent.settings(target)
    file = settings.file
    try:
        old = file.read_bytes() if file.exists() else b""
        new = merged(settings, old.decode()).encode()
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"cannot change `{file}`: {exc}",
            hint=f"change it by hand, or start with `metal launch {agent.name}`",
        ) from exc
    if new == old:
        printer.note(f"`{file}` says so already")
        return
    if old:
        backup = _free(file)
        own_file.write(backup, old)
        printer.note(f"kept the old one as `{backup}`")
    own_file.write(file, new)
    printer.note(f"wrote `{file}`")


def _free(file: Path) -> Path:
    """A backup is never written over: the oldest is the one before us."""
    backup, number = file.with_name(f"{file.name}.backup"), 1
    while backup.exists():
        number += 1
        backup = file.with_name(f"{file.name}.backup-{number}")
    return backup
