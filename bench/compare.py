"""This server against mlx_lm.server: the same model and load, one after the other, in alternating pairs.

python bench/compare.py --model DIR --concurrency 8 --num-prompts 24
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison import measure, medians, ratios, table
from provenance import commit
from servers import OURS, THEIRS, Server

from vllm_metal.bench.client import Target
from vllm_metal.bench.load import Load
from vllm_metal.bench.machine import machine, versions

ROWS = (
    "completed",
    "failed",
    "total_output_tokens",
    "output_throughput",
    "total_token_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "max_itl_ms",
    "median_e2el_ms",
    "server_cpu_s",
    "output_tokens_per_cpu_s",
)


def main(arguments: argparse.Namespace) -> None:
    load = Load(
        num_prompts=arguments.num_prompts,
        input_words=arguments.input_words,
        output_len=arguments.output_len,
        shared_prefix_words=arguments.shared_prefix_words,
        max_concurrency=arguments.concurrency,
        warmup=arguments.warmup,
        seed=arguments.seed,
    )
    sampling = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(arguments, name)) is not None
    }
    begun = datetime.now(UTC)
    stem = arguments.name or f"compare-{begun:%Y%m%dT%H%M%SZ}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    # mlx_lm.server decodes 32 requests at once unless told otherwise.
    theirs = f"--decode-concurrency {max(32, arguments.concurrency)} {arguments.mlx_lm_args}"
    server_arguments = {OURS: arguments.metal_args, THEIRS: theirs}

    runs: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    for pair in range(arguments.pairs):
        # Whoever goes first in one pair goes second in the next.
        for name in (OURS, THEIRS) if pair % 2 == 0 else (THEIRS, OURS):
            log = arguments.out / f"{stem}-{name}.log"
            with Server(name, arguments.model.resolve(), log, server_arguments[name]) as server:
                target = Target(url=server.url, endpoint_type=arguments.endpoint_type, sampling=sampling)
                runs[name].append(measure(server, load, target))
            throughput = runs[name][-1]["output_throughput"]
            sys.stderr.write(f"pair {pair + 1} of {arguments.pairs}: {name} {throughput:.1f} tok/s\n")

    ours, theirs_medians = medians(runs[OURS]), medians(runs[THEIRS])
    sys.stdout.write(table(ours, theirs_medians, ROWS) + "\n")
    result = {
        "date": begun.isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "versions": versions(),
        "medians": {OURS: ours, THEIRS: theirs_medians},
        "ratios": ratios(ours, theirs_medians),
        "runs": runs,
    }
    file = arguments.out / f"{stem}.json"
    file.write_text(json.dumps(result) + "\n")
    sys.stderr.write(f"wrote `{file}`\n")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder that both servers can load")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--input-words", type=_numbers, default=(16, 64, 128))
    parser.add_argument("--output-len", type=_numbers, default=(64,))
    parser.add_argument("--shared-prefix-words", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--endpoint-type", choices=("chat", "completions"), default="chat")
    parser.add_argument("--warmup", type=int, default=2, help="requests of each run that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metal-args", default="", help="further arguments of `metal serve`, in one string")
    parser.add_argument("--mlx-lm-args", default="", help="further arguments of mlx_lm.server, in one string")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", help="of the result's files; else the date")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
