"""This server against mlx_lm.server on a GPU, with random weights of a real shape.

PYTHONPATH=src python bench/gpu.py --out DIR --preset 0.5b --tokenizer DIR --cases c1,mixed64

Needs neither the package installed nor a repository. The result is rewritten after every case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import random_model
from compare import ROWS
from comparison import measure, ratios, table
from provenance import commit
from servers import OURS, THEIRS, Server, ServerFailed

from vllm_metal.bench.client import StreamingClient, Target
from vllm_metal.bench.load import Load, Prompt
from vllm_metal.bench.machine import machine, versions
from vllm_metal.bench.record import RequestRecord

MIX = {"input_words": (64, 256, 1024), "output_len": (64, 128, 256)}
NUM_STREAMS = 8
SETTLED_CHUNKS = 32
WINDOW_S = 3.0
LATE_AFTER_S = 0.2

Measure = Callable[[Server, float], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of each case is run; less of everything shows on any machine that the script works."""

    requests: float = 1.0
    words: float = 1.0

    def load(self, load: Load) -> Load:
        return replace(
            load,
            num_prompts=max(2, round(load.num_prompts * self.requests)),
            warmup=max(1, round(load.warmup * self.requests)),
            input_words=tuple(map(self.num_words, load.input_words)),
            output_len=tuple(map(self.num_words, load.output_len)),
            shared_prefix_words=self.num_words(load.shared_prefix_words) if load.shared_prefix_words else 0,
        )

    def num_words(self, count: int) -> int:
        return max(4, round(count * self.words))


LOADS = {
    "c1": Load(num_prompts=8, **MIX, max_concurrency=1, warmup=3),
    "c16": Load(num_prompts=64, **MIX, max_concurrency=16, warmup=64),
    "mixed64": Load(num_prompts=192, **MIX, max_concurrency=64, warmup=192),
    "prefix16": Load(
        num_prompts=64,
        input_words=(64,),
        output_len=(64, 128),
        shared_prefix_words=3000,
        max_concurrency=16,
        warmup=32,
    ),
}


def under_load(load: Load, server: Server, limit_s: float) -> dict[str, Any]:
    return measure(server, load, Target(url=server.url, sampling={"temperature": 0}), limit_s=limit_s)


def same_prompt_again(num_words: int, server: Server, limit_s: float) -> dict[str, Any]:
    """The time to the first token of a prompt, new and sent once more."""

    async def main() -> list[list[float]]:
        prompts = Load(num_prompts=3, warmup=1, input_words=(num_words,), output_len=(8,))
        async with asyncio.timeout(limit_s), StreamingClient(Target(url=server.url)) as client:
            for prompt in prompts.warmup_prompts():
                await _ask(client, prompt)
            return [
                [(await _ask(client, prompt)).ttft_s * 1000 for _ in range(2)] for prompt in prompts.prompts()
            ]

    pairs = asyncio.run(main())
    cold_ms, again_ms = (statistics.median(pair[i] for pair in pairs) for i in range(2))
    return {"cold_ttft_ms": cold_ms, "again_ttft_ms": again_ms, "again_to_cold": again_ms / cold_ms}


def long_prompt(num_words: int, server: Server, limit_s: float) -> dict[str, Any]:
    """Eight streams decode; a long prompt arrives, and soon after it a short one.

    Rates are those of the eight together, in chunks a second: over a few seconds before the long prompt, and
    from its arrival to its first token.
    """

    async def main() -> dict[str, Any]:
        target = Target(url=server.url, sampling={"temperature": 0})
        async with asyncio.timeout(limit_s), StreamingClient(target) as client:
            streams = [RequestRecord(max_tokens=8192) for _ in range(NUM_STREAMS)]
            tasks = [
                asyncio.create_task(client.stream(_prompt(64, stream.max_tokens, seed=10 + number), stream))
                for number, stream in enumerate(streams)
            ]
            try:
                while min(len(stream.arrivals_s) for stream in streams) < SETTLED_CHUNKS:
                    _require_running(tasks)
                    await asyncio.sleep(0.01)
                # Its like goes first, beside the same streams, for whatever is compiled at first use.
                await _ask(client, _prompt(num_words, 4, seed=1))
                settled_s = time.perf_counter()
                await asyncio.sleep(WINDOW_S)
                long = asyncio.create_task(_ask(client, _prompt(num_words, 16, seed=2)))
                await asyncio.sleep(LATE_AFTER_S)
                late = await _ask(client, _prompt(32, 16, seed=3))
                first = await long
                _require_running(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        before = _rate(streams, settled_s, first.started_s)
        during = _rate(streams, first.started_s, first.arrivals_s[0])
        gaps_s = [gap_s for stream in streams for gap_s in stream.itls_s]
        return {
            "prompt_tokens": first.prompt_tokens,
            "rate_before": before,
            "rate_during": during,
            "rate_kept": during / before,
            "long_ttft_ms": first.ttft_s * 1000,
            "late_ttft_ms": late.ttft_s * 1000,
            "max_itl_ms": max(gaps_s) * 1000,
            "arrivals_s": [
                [round(arrival_s - first.started_s, 6) for arrival_s in stream.arrivals_s]
                for stream in streams
            ],
        }

    return asyncio.run(main())


def _prompt(num_words: int, max_tokens: int, *, seed: int) -> Prompt:
    load = Load(num_prompts=1, input_words=(num_words,), output_len=(max_tokens,), seed=seed)
    [prompt] = load.prompts()
    return prompt


async def _ask(client: StreamingClient, prompt: Prompt) -> RequestRecord:
    record = RequestRecord(prompt.max_tokens)
    await client.stream(prompt, record)
    if record.error is not None:
        raise ServerFailed(record.error)
    return record


def _require_running(tasks: Sequence[asyncio.Task[None]]) -> None:
    if any(task.done() for task in tasks):
        raise ServerFailed("a stream ended before the long prompt was answered")


def _rate(streams: Sequence[RequestRecord], begin_s: float, end_s: float) -> float:
    num_chunks = sum(begin_s <= each < end_s for stream in streams for each in stream.arrivals_s)
    return num_chunks / (end_s - begin_s)


def cases(scale: Scale) -> dict[str, Measure]:
    return {
        **{name: partial(under_load, scale.load(load)) for name, load in LOADS.items()},
        "again": partial(same_prompt_again, scale.num_words(3000)),
        "long": partial(long_prompt, scale.num_words(16000)),
    }


def run_cases(
    name: str,
    model: Path,
    log: Path,
    arguments: str,
    pending: dict[str, Measure],
    limit_s: float,
    keep: Callable[[str, dict[str, Any]], None],
) -> None:
    """One server for all cases; after one that fails or passes its limit, a fresh one for the rest."""
    while pending:
        with Server(name, model, log, arguments) as server:
            while pending:
                case = next(iter(pending))
                try:
                    result = pending.pop(case)(server, limit_s)
                except TimeoutError:
                    result = {"error": f"not done within {limit_s:g} s"}
                except ServerFailed as exc:
                    result = {"error": str(exc)}
                keep(case, result)
                if result.get("error") or result.get("timed_out"):
                    break


def main(arguments: argparse.Namespace) -> None:
    chosen = cases(Scale(arguments.requests, arguments.words))
    if unknown := set(arguments.cases) - set(chosen):
        raise SystemExit(f"error: no such case: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    model = arguments.model or Path(tempfile.gettempdir()) / f"vllm-metal-random-{arguments.preset}"
    if not model.exists():
        random_model.make(arguments.preset, arguments.tokenizer, model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"gpu-{arguments.preset}.json"
    results: dict[str, dict[str, Any]] = {case: {} for case in arguments.cases}
    about = {
        "command": shlex.join(sys.argv),
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "versions": versions(),
        "preset": arguments.preset,
    }
    server_arguments = {
        OURS: arguments.metal_args,
        THEIRS: f"--decode-concurrency 64 {arguments.mlx_lm_args}",
    }
    for name in arguments.servers:

        def keep(case: str, result: dict[str, Any], name: str = name) -> None:
            results[case][name] = result
            file.write_text(json.dumps(about | {"cases": results}) + "\n")
            sys.stderr.write(f"{name} {case}: {result.get('error') or _headline(result)}\n")

        log = arguments.out / f"gpu-{arguments.preset}-{name}.log"
        pending = {case: chosen[case] for case in arguments.cases}
        try:
            run_cases(name, model, log, server_arguments[name], pending, arguments.limit, keep)
        except ServerFailed as exc:
            sys.stderr.write(f"error: {exc}\n")
    for case, by_server in results.items():
        sys.stdout.write(f"\n{case}\n{_table(by_server)}\n")
    about["ratios"] = {
        case: ratios(_numbers(by_server.get(OURS, {})), _numbers(by_server.get(THEIRS, {})))
        for case, by_server in results.items()
    }
    file.write_text(json.dumps(about | {"cases": results}) + "\n")


def _table(by_server: dict[str, dict[str, Any]]) -> str:
    ours, theirs = (_numbers(by_server.get(name, {})) for name in (OURS, THEIRS))
    rows = ROWS if "output_throughput" in ours | theirs else tuple(ours | theirs)
    return table(ours, theirs, rows)


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if type(value) in (int, float)}


def _headline(result: dict[str, Any]) -> str:
    names = ("output_throughput", "median_ttft_ms", "rate_kept", "late_ttft_ms", "again_to_cold", "timed_out")
    return ", ".join(f"{name} {result[name]:.6g}" for name in names if result.get(name))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result and the servers' logs")
    parser.add_argument("--preset", choices=random_model.PRESETS, default="0.5b")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder that `export_smollm2.py --tokenizer-only` wrote"
    )
    parser.add_argument("--model", type=Path, help="where the random model is kept; made if missing")
    parser.add_argument("--cases", type=_names, default=tuple(cases(Scale())), help=",".join(cases(Scale())))
    parser.add_argument("--servers", type=_names, default=(OURS, THEIRS), help=f"{OURS},{THEIRS}")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each case of each server")
    parser.add_argument("--requests", type=float, default=1.0, help="share of each case's requests")
    parser.add_argument("--words", type=float, default=1.0, help="share of each prompt's and answer's length")
    parser.add_argument("--metal-args", default="", help="further arguments of `metal serve`, in one string")
    parser.add_argument("--mlx-lm-args", default="", help="further arguments of mlx_lm.server, in one string")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    main(_arguments())
