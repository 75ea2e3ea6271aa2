"""`metal chat`: talk to the running server, or to a model loaded into this process."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_metal.errors import MetalError

if TYPE_CHECKING:
    from vllm_metal.client import Client
    from vllm_metal.config import Config


def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="Model to talk to; the server's default when left out.", metavar="[MODEL]"),
    ] = None,
    quick: Annotated[
        str | None,
        typer.Option(
            "--quick", "-q", metavar="TEXT", help="Ask one question and exit; `-` reads it from stdin."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Server to talk to, `unix:/path` for a socket; else the configured one."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key the server asks for.")] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run the model in this process, without a server.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="0 always picks the likeliest token.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this total.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file to use.")] = None,
) -> None:
    """Chat with a model.

    On a terminal this is a conversation; with `--quick`, or a prompt piped in, one answer.
    """
    from vllm_metal.cli.chat_conversation import Conversation
    from vllm_metal.config import load

    if local and url:
        raise typer.BadParameter("`--local` talks to no server: leave out one of the two", param_hint="--url")
    question = _question(quick)
    settings = load(path=config, flags={"models.default": model if local else None})
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    with _local(settings) if local else _remote(url, api_key, settings) as client:
        conversation = Conversation(
            client,
            # In this process there is only the one.
            model=None if local else model,
            system=system,
            params={name: value for name, value in sampling.items() if value is not None},
        )
        if question is not None:
            conversation.ask(question)
        else:
            from vllm_metal.cli.chat_repl import Repl

            Repl(conversation).run()


def _local(config: Config) -> AbstractContextManager[Client]:
    """A client of the default model, loaded into this process until the exit."""
    from vllm_metal.cli.progress import pull_progress
    from vllm_metal.server.local import LocalClient

    return LocalClient(config, pull_progress)


def _remote(url: str | None, api_key: str | None, config: Config) -> AbstractContextManager[Client]:
    from vllm_metal.client import client_of

    return nullcontext(client_of(config.server, url, api_key))


def _question(quick: str | None) -> str | None:
    """The one question to ask, from the option or a pipe; None means a conversation."""
    if quick is None and sys.stdin.isatty():
        return None
    if quick is None or quick == "-":
        given = sys.stdin.buffer.read()
    else:
        # The bytes that were typed, whatever the locale made of them.
        given = os.fsencode(quick)
    try:
        question = given.decode()
    except UnicodeDecodeError:
        raise MetalError("the prompt is not UTF-8 text") from None
    if not question.strip():
        raise MetalError("the prompt is empty", hint='ask something: `metal chat -q "Why is the sky blue?"`')
    return question.rstrip("\n")
