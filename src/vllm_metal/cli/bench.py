"""`metal bench`: put load on a server, or on an engine without one, and measure what comes back."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_metal.cli import printer
from vllm_metal.errors import ConfigError, MetalError, ServerUnreachable

if TYPE_CHECKING:
    from vllm_metal.bench.client import Target
    from vllm_metal.bench.engine import Contender, Figures, Pair
    from vllm_metal.bench.load import Load
    from vllm_metal.bench.record import RequestRecord
    from vllm_metal.config import Config
    from vllm_metal.engine.async_engine import LoadedEngine
    from vllm_metal.engine.sampling_params import SamplingParams

app = typer.Typer(no_args_is_help=True, help="Measure how fast models are served.")

_PLAIN_LINES = 10


class EndpointType(StrEnum):
    chat = "chat"
    completions = "completions"


@app.callback()
def bench() -> None:
    """Measure how fast models are served."""


@app.command()
def serve(
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server to measure, of any make; else the configured one."),
    ] = None,
    endpoint_type: Annotated[EndpointType, typer.Option(help="Which endpoint to use.")] = EndpointType.chat,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; else the first that the server lists.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key the server asks for.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 64,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests under way at once; else no limit.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second on average (Poisson); `inf` sends all at once.")
    ] = math.inf,
    seed: Annotated[
        int, typer.Option(help="Draws the prompts; a server may have those of a seed it has seen cached.")
    ] = 0,
    input_words: Annotated[
        str, typer.Option(metavar="N,…", help="Prompt lengths in words; each request draws one.")
    ] = "256",
    output_len: Annotated[
        str, typer.Option(metavar="N,…", help="Longest answers in tokens; each request draws one.")
    ] = "128",
    shared_prefix_words: Annotated[
        int, typer.Option(min=0, help="Words that all prompts begin with (in chats, the system message).")
    ] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="0 always picks the likeliest token.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this total.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many of the likeliest tokens.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length; not every server obeys.")
    ] = False,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first and not counted.")] = 0,
    percentiles: Annotated[str, typer.Option(metavar="P,…", help="Percentiles to report.")] = "99",
    save_result: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all figures and every request as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw latencies and throughput.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
    config: Annotated[Path | None, typer.Option(metavar="PATH", help="Read this configuration file.")] = None,
) -> None:
    """Measure a running server, with the options and figures of `vllm bench serve`.

    Interrupted, it reports what was measured so far.
    """
    from vllm_metal.bench import report
    from vllm_metal.bench.load import Load
    from vllm_metal.bench.statistics import figures

    if not request_rate > 0:
        raise typer.BadParameter("must be above 0", param_hint="--request-rate")
    asked_percentiles = _numbers(percentiles, "--percentiles", float, 0, 100)
    load = Load(
        num_prompts=num_prompts,
        input_words=_numbers(input_words, "--input-words", int, 1, 10**6),
        output_len=_numbers(output_len, "--output-len", int, 1, 10**6),
        shared_prefix_words=shared_prefix_words,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        warmup=warmup,
        seed=seed,
    )
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "ignore_eos": ignore_eos or None}
    target = _target(
        base_url,
        endpoint_type.value,
        model,
        api_key,
        {name: value for name, value in sampling.items() if value is not None},
        config,
    )
    records, interrupted = _measure(load, target)
    measured = figures(records, asked_percentiles)
    result = report.result(
        command=shlex.join(["metal", *_without_key(sys.argv[1:])]),
        load=load,
        target=target,
        records=records,
        figures=measured,
        interrupted=interrupted,
    )
    printer.out(json.dumps(result, indent=2) if as_json else report.table(measured, load))
    if save_result is not None:
        _write(save_result, json.dumps(result, indent=2) + "\n")
    if plot is not None:
        from vllm_metal.bench.plot import svg

        _write(plot, svg(records))
    if interrupted:
        raise typer.Exit(130)
    if measured.completed == 0:
        raise MetalError(f"every request failed: {records[0].error}", hint="the server's log may say more")


@app.command()
def engine(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As for `metal serve`; else the configured one.")
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="N,…", help="Requests at once; each number is measured by itself.")
    ] = "1,8,16,64",
    input_len: Annotated[int, typer.Option(min=1, help="Length of each prompt, in tokens.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Length of each answer, in tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, help="0 always picks the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1, help="Sample from the likeliest tokens of this total.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind, taking turns.")] = 3,
    limit: Annotated[
        bool, typer.Option("--limit", help="Run bare decoding loops too, and print how close we come.")
    ] = False,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Run with temperature 0.7 and top-p 0.9 too.")
    ] = False,
    save_result: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all figures of every round as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
    config: Annotated[Path | None, typer.Option(metavar="PATH", help="Read this configuration file.")] = None,
) -> None:
    """Measure the engine alone, in this process: random prompts, and answers of full length.

    Figures are medians over rounds; in the ratios, above 1 is faster or cheaper than what is compared with.
    """
    from dataclasses import asdict, replace

    from vllm_metal import config as configuration
    from vllm_metal import log
    from vllm_metal.bench import engine_report
    from vllm_metal.bench.engine import Work, measure
    from vllm_metal.engine.sampling_params import SamplingParams

    batches = _numbers(batch, "--batch", int, 1, 1024)
    settings = configuration.load(path=config, flags={"models.default": model})
    # All prompts come first, so that every request decodes at once for as long as possible.
    settings = replace(
        settings, engine=replace(settings.engine, max_num_seqs=max(batches), max_step_stretch=100.0)
    )
    log.setup(settings.log.level, settings.log.file)
    params = SamplingParams(temperature=temperature, top_p=top_p, ignore_eos=True)
    loaded = _load(settings)
    try:
        if input_len + output_len > loaded.max_model_len:
            raise typer.BadParameter(
                f"with the answer that is over {loaded.max_model_len} tokens, the most of this model",
                param_hint="--input-len",
            )
        contenders, pairs = _contenders(loaded, params, limit=limit, sampled=sampled)
        results = []
        for size in batches:

            def say(name: str, number: int, figures: Figures, size: int = size) -> None:
                rate = f"{figures.output_throughput:.1f} tok/s"
                printer.note(f"batch {size}, round {number + 1} of {rounds}: {name} {rate}")

            work = Work(size, input_len, output_len)
            vocab_size = loaded.tokenizer.vocab_size
            results.append(measure(work, contenders, pairs, vocab_size=vocab_size, rounds=rounds, on_run=say))
    finally:
        loaded.core.close()
    result = engine_report.result(
        command=shlex.join(["metal", *sys.argv[1:]]),
        model=settings.models.default,
        settings=asdict(settings.engine) | {"temperature": temperature, "top_p": top_p},
        results=results,
    )
    printer.out(json.dumps(result, indent=2) if as_json else engine_report.table(results))
    if save_result is not None:
        _write(save_result, json.dumps(result, indent=2) + "\n")


def _load(config: Config) -> LoadedEngine:
    """The engine as the server has it, on this thread."""
    from vllm_metal.cli.progress import pull_progress
    from vllm_metal.engine.mlx.build import build
    from vllm_metal.hub import names
    from vllm_metal.hub.pull import pull

    source = names.configured_source(config.models)
    with pull_progress() as on_progress:
        local = pull(source, models_dir=config.models.store, on_progress=on_progress)
    return build(local.path, config)


def _contenders(
    loaded: LoadedEngine, params: SamplingParams, *, limit: bool, sampled: bool
) -> tuple[dict[str, Contender], list[Pair]]:
    """The engine and what else runs, and which of them are compared."""
    from dataclasses import replace

    from vllm_metal.bench.engine import engine_contender, loop_contender
    from vllm_metal.engine.mlx.bare_loops import bare_loops

    contenders = {"engine": engine_contender(loaded.core, params)}
    pairs = []
    if limit:
        loops = bare_loops(loaded.core.runner)
        if not loops:
            printer.warning(
                "this model cannot be decoded in batches, so there is no bare loop to compare with"
            )
        contenders |= {name: loop_contender(loop) for name, loop in loops.items()}
        pairs += [("engine", name) for name in loops]
    if sampled:
        drawn = replace(params, temperature=0.7, top_p=0.9)
        contenders["sampled"] = engine_contender(loaded.core, drawn)
        pairs.append(("sampled", "engine"))
    return contenders, pairs


def _target(
    url: str | None,
    endpoint_type: Any,
    model: str | None,
    api_key: str | None,
    sampling: dict[str, Any],
    config: Path | None,
) -> Target:
    """Asks the server for its models, which also tells that it is there."""
    from vllm_metal.bench.client import Target
    from vllm_metal.client import Client, server_url
    from vllm_metal.config import load

    if url is None:
        settings = load(path=config).server
        url = server_url(settings)
        # The configured keys are for the configured server: never sent anywhere else.
        api_key = api_key or next(iter(settings.api_keys), None)
    client = Client(url, api_key)
    try:
        models = client.models()
    except ServerUnreachable as exc:
        raise ServerUnreachable(
            exc.message, hint="start it with `metal serve`, or name another with `--base-url`"
        ) from exc
    return Target(
        url=client.url,
        endpoint_type=endpoint_type,
        model=model or (models[0]["id"] if models else None),
        api_key=api_key,
        sampling=sampling,
    )


def _measure(load: Load, target: Target) -> tuple[list[RequestRecord], bool]:
    """The requests that finished, and whether an interrupt cut the run short."""
    import asyncio

    from vllm_metal.bench.run import run, warm_up

    records: list[RequestRecord] = []

    async def main(advance: Callable[[], None]) -> None:
        await warm_up(load, target)
        await run(load, target, records, advance)

    try:
        with _progress(load.num_prompts) as advance:
            asyncio.run(main(advance))
    except KeyboardInterrupt:
        if not records:
            raise
        printer.warning(f"interrupted: {len(records)} of {load.num_prompts} requests were measured")
        return records, True
    return records, False


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a few plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _plain_lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A few refreshes a second: the machine's time belongs to the server.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _plain_lines(total: int) -> Callable[[], None]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done * _PLAIN_LINES // total > (done - 1) * _PLAIN_LINES // total:
            printer.note(f"{done} of {total} requests")

    return advance


def _numbers(
    text: str, option: str, kind: Callable[[str], Any], lowest: int, highest: int
) -> tuple[Any, ...]:
    try:
        numbers = tuple(kind(item) for item in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(lowest <= number <= highest for number in numbers):
        raise typer.BadParameter(
            f"`{text}` is not a list of numbers from {lowest} to {highest}, such as `64,99`",
            param_hint=option,
        )
    return numbers


def _without_key(arguments: list[str]) -> list[str]:
    """The command line as it may be kept in a file."""
    kept = list(arguments)
    for i, argument in enumerate(arguments):
        if argument == "--api-key" and i + 1 < len(kept):
            kept[i + 1] = "***"
        elif argument.startswith("--api-key="):
            kept[i] = "--api-key=***"
    return kept


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot write `{path}`: {exc.strerror}", hint="name another file") from exc
    printer.note(f"wrote `{path}`")
