"""What embeddings cost the chats beside them: gaps between tokens, with and without texts being embedded.

python bench/embeddings.py --model "$(metal pull smollm2)" --embedder FOLDER [--save-result PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import provenance
from servers import OURS, Server

from vllm_metal.bench import run
from vllm_metal.bench.client import Target
from vllm_metal.bench.load import Load
from vllm_metal.bench.record import RequestRecord
from vllm_metal.bench.statistics import percentile
from vllm_metal.bench.words import WORDS

TARGET_RATIO = 1.5


@dataclass(slots=True)
class Embedder:
    """Keeps `concurrency` requests of one text each under way."""

    url: str
    model: str
    num_words: int
    latencies_s: list[float] = field(default_factory=list)

    async def keep_busy(self, concurrency: int) -> None:
        """Until it is cancelled."""
        connector = aiohttp.TCPConnector(limit=concurrency)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(self._embed(session, random.Random(number)))

    async def _embed(self, session: aiohttp.ClientSession, source: random.Random) -> None:
        while True:
            body = _body(self.model, " ".join(source.choices(WORDS, k=self.num_words)))
            began_s = time.perf_counter()
            async with session.post(f"{self.url}/v1/embeddings", json=body) as reply:
                if reply.status != 200:
                    raise SystemExit(f"{reply.status}: {await reply.text()}")
                await reply.read()
            self.latencies_s.append(time.perf_counter() - began_s)


async def measure(url: str, load: Load, embedder: Embedder | None, concurrency: int) -> dict[str, float]:
    records: list[RequestRecord] = []
    embedding = asyncio.create_task(embedder.keep_busy(concurrency)) if embedder else None
    began_s = time.perf_counter()
    await run.run(load, Target(url=url), records)
    duration_s = time.perf_counter() - began_s
    if embedding is not None:
        embedding.cancel()
        with suppress(asyncio.CancelledError):
            await embedding
    if errors := [record.error for record in records if record.error]:
        raise SystemExit(f"{len(errors)} chats failed: {errors[0]}")
    gaps_ms = sorted(1e3 * gap for record in records for gap in record.itls_s)
    figures = {
        "itl_median_ms": percentile(gaps_ms, 50),
        "itl_p99_ms": percentile(gaps_ms, 99),
        "output_tokens_per_s": sum(record.output_tokens for record in records) / duration_s,
    }
    if embedder is not None:
        figures["embeddings_per_s"] = len(embedder.latencies_s) / duration_s
        figures["embedding_median_ms"] = 1e3 * median(embedder.latencies_s or [duration_s])
    return figures


async def alternate(arguments: argparse.Namespace, url: str) -> dict[str, list[dict[str, float]]]:
    """The two cases by turns, so that what else the machine does falls on both."""
    load = Load(
        num_prompts=arguments.chats,
        input_words=(arguments.chat_words,),
        output_len=(arguments.output_len,),
        max_concurrency=arguments.chats,
        warmup=arguments.chats,
    )
    model = arguments.embedder.name
    await run.warm_up(load, Target(url=url))
    await _warm_up(url, model)
    runs: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    for _ in range(arguments.pairs):
        runs["alone"].append(await measure(url, load, None, 0))
        embedder = Embedder(url, model, arguments.words)
        runs["beside"].append(await measure(url, load, embedder, arguments.embeddings))
    return runs


async def _warm_up(url: str, model: str) -> None:
    async with aiohttp.ClientSession() as session:
        texts = [" ".join(WORDS[:length]) for length in (4, 16, 64)]
        async with session.post(f"{url}/v1/embeddings", json=_body(model, texts)) as reply:
            if reply.status != 200:
                raise SystemExit(f"{reply.status}: {await reply.text()}")


def _body(model: str, texts: str | list[str]) -> dict[str, Any]:
    return {"model": model, "input": texts, "truncate_prompt_tokens": -1}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the runs, and the ratio of what is measured."""
    medians = {
        case: {name: median(each[name] for each in figures) for name in figures[0]}
        for case, figures in runs.items()
    }
    ratio = medians["beside"]["itl_p99_ms"] / medians["alone"]["itl_p99_ms"]
    return {"medians": medians, "itl_p99_ratio": ratio}


def main(arguments: argparse.Namespace) -> None:
    os.environ["METAL_MODELS_DIR"] = str(arguments.embedder.absolute().parent)
    with Server(OURS, arguments.model, arguments.log) as server:
        runs = asyncio.run(alternate(arguments, server.url))
    found = summary(runs)
    for case, figures in found["medians"].items():
        for name, figure in figures.items():
            sys.stdout.write(f"{case:<8}{name:<22}{figure:>10.2f}\n")
    sys.stdout.write(f"p99 of gaps, beside / alone: {found['itl_p99_ratio']:.2f} (at most {TARGET_RATIO})\n")
    if arguments.save_result is not None:
        provenance.save(arguments.save_result, target_ratio=TARGET_RATIO, **found, runs=runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the model that chats")
    parser.add_argument("--embedder", type=Path, required=True, help="the folder of the model that embeds")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--chat-words", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--embeddings", type=int, default=64, help="how many are under way at once")
    parser.add_argument("--words", type=int, default=64, help="of each text that is embedded")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="where the server writes to")
    parser.add_argument("--save-result", type=Path, metavar="PATH")
    main(parser.parse_args())
