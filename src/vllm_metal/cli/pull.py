"""`metal pull`: bring models to this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_metal.cli import printer
from vllm_metal.errors import EngineError, MetalError

if TYPE_CHECKING:
    from vllm_metal.config import Config
    from vllm_metal.hub.names import Source
    from vllm_metal.hub.progress import OnProgress
    from vllm_metal.hub.repository import Repository
    from vllm_metal.hub.store import LocalModel

_AT_ONCE = 4


def pull(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="`org/name` or `org/name@revision` of the hub, `org/name:Q4_0` for one of its GGUF files, a "
            "short name such as `qwen3-4b` or `smollm2`, a folder or a `.gguf` file.",
            show_default=False,
        ),
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub.")] = None,
    quant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which of a repository's GGUF files, as in `Q4_0`.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Look on this machine alone.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Fetch even what cannot run on this machine.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="PATH", help="Read this configuration file.", show_default=False),
    ] = None,
) -> None:
    """Download models, unless they are here already, and print their paths.

    A pull that was stopped goes on where it was. What cannot run here is refused before the download.
    """
    from vllm_metal import config as configuration
    from vllm_metal.hub import names

    loaded = configuration.load(path=config)
    wanted = [
        _with(names.parse_source(text, loaded.models), revision, quant) for text in dict.fromkeys(sources)
    ]
    failures = []
    for outcome in _pull_all(wanted, loaded, offline=offline, force=force):
        if isinstance(outcome, MetalError):
            failures.append(outcome)
        else:
            printer.out(str(outcome.path))
    for failure in failures[:-1]:
        printer.error(failure)
        printer.note()
    if failures:
        raise failures[-1]


def _with(source: Source, revision: str | None, quant: str | None) -> Source:
    from vllm_metal.hub.names import HubSource

    if not revision and not quant:
        return source
    if not isinstance(source, HubSource):
        raise MetalError(f"`{source}` is not of the hub", hint="leave out `--revision` and `--quant`")
    return replace(source, revision=revision or source.revision, quant=quant or source.quant)


def _pull_all(
    sources: Sequence[Source], config: Config, *, offline: bool, force: bool
) -> Iterator[LocalModel | MetalError]:
    """The outcomes in the order of `sources`. Leaving ends what is under way."""
    from vllm_metal.cli.progress import pull_progress
    from vllm_metal.hub import pull as hub
    from vllm_metal.hub.progress import PullProgress

    left = threading.Event()

    def pull_one(source: Source, show: OnProgress) -> LocalModel | MetalError:
        def on_progress(progress: PullProgress) -> None:
            if left.is_set():
                raise KeyboardInterrupt
            show(progress)

        def approve(repository: Repository) -> None:
            if not force:
                show(PullProgress(_judgement(repository, config)))

        try:
            return hub.pull(
                source,
                models_dir=config.models.store,
                on_progress=on_progress,
                offline=offline,
                approve=approve,
            )
        except MetalError as exc:
            return exc

    with pull_progress(several=len(sources) > 1) as show, ThreadPoolExecutor(_AT_ONCE) as executor:
        pulls = [executor.submit(pull_one, source, show) for source in sources]
        try:
            yield from [each.result() for each in pulls]
        finally:
            left.set()


def _judgement(repository: Repository, config: Config) -> str:
    from vllm_metal.monitor import admission

    try:
        return admission.judge(repository, config.engine)
    except EngineError as exc:
        return f"nothing tells whether `{repository.source}` can run here: {exc.message}"
