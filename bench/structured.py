"""What it costs to hold answers to a schema: decode steps against free ones, and the wait for a new schema.

On a GPU steps run one ahead, as in the server; there the forwards hide what the host does for masks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import provenance

from vllm_metal import config
from vllm_metal.engine.async_engine import LoadedEngine
from vllm_metal.engine.core import EngineCore
from vllm_metal.engine.mlx.build import build
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.structure.compiler import CompiledGrammar
from vllm_metal.structure.grammar import Grammar

_PROMPT = "Write a long list of people as JSON, each with a name, an age, a city and tags."
_SETTLING = 8
_NUM_SCHEMAS = 20

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"type": "string", "maxLength": 24},
        "tags": {"type": "array", "items": {"enum": ["friend", "family", "work"]}, "maxItems": 2},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
#: Longer than any round, so that all rows decode in all steps.
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}


def of_schema(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))


def new_schemas() -> Iterator[dict[str, Any]]:
    """Of 2 kB each, no two alike."""
    source = random.Random(0)
    for _ in range(_NUM_SCHEMAS):
        names = [f"field_{source.randrange(10**6)}" for _ in range(16)]
        kinds = [*PERSON["properties"].values(), {"type": "boolean"}, {"type": "number"}]
        properties = {
            name: {**source.choice(kinds), "description": f"What is known of {name}."} for name in names
        }
        yield {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def round_of(
    core: EngineCore, prompt: list[int], grammar: CompiledGrammar | None, num_rows: int, num_steps: int
) -> tuple[float, float]:
    """Seconds of wall and of processor time of a step in which `num_rows` rows decode."""
    for number in range(num_rows):
        params = SamplingParams(temperature=0.0, ignore_eos=True, grammar=grammar)
        matcher = grammar.matcher() if grammar else None
        max_tokens = 2 * _SETTLING + num_rows + num_steps
        core.add_request(Request(f"{number}", prompt, params, max_tokens=max_tokens, seed=0, matcher=matcher))
    while core.scheduler.waiting or any(each.num_remaining_tokens > 1 for each in core.scheduler.running):
        core.step()
    for _ in range(_SETTLING):
        core.step()
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        core.step()
    assert len(core.scheduler.running) == num_rows
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
    while core.has_work():
        core.step()
    return took_s / num_steps, cpu_s / num_steps


def measure(loaded: LoadedEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    assert loaded.grammars is not None
    grammars = loaded.grammars

    async def compiled(grammar: Grammar) -> CompiledGrammar:
        return await grammars.compile(grammar)

    grammar = asyncio.run(compiled(of_schema(PEOPLE)))
    prompt = loaded.tokenizer.encode(_PROMPT)
    rounds = []
    for number in range(arguments.rounds):
        pair: dict[str, tuple[float, float]] = {}
        for name in ("free", "held") if number % 2 else ("held", "free"):
            held = grammar if name == "held" else None
            pair[name] = round_of(loaded.core, prompt, held, arguments.batch, arguments.steps)
        rounds.append(pair)
    waits_s = []
    for schema in new_schemas():
        began_s = time.perf_counter()
        asyncio.run(compiled(of_schema(schema))).matcher()
        waits_s.append(time.perf_counter() - began_s)
    return {
        "rows": arguments.batch,
        "steps": arguments.steps,
        "rounds": rounds,
        "free_step_ms": 1000 * median(each["free"][0] for each in rounds),
        "held_step_ms": 1000 * median(each["held"][0] for each in rounds),
        "speed_ratio": median(each["free"][0] / each["held"][0] for each in rounds),
        "cpu_ratio": median(each["free"][1] / each["held"][1] for each in rounds),
        "schema_bytes": median(len(json.dumps(schema)) for schema in new_schemas()),
        "new_schema_ms_median": 1000 * median(waits_s),
        "new_schema_ms_worst": 1000 * max(waits_s),
    }


def main(arguments: argparse.Namespace) -> None:
    settings = config.load()
    loaded = build(
        arguments.model, replace(settings, engine=replace(settings.engine, max_num_seqs=arguments.batch))
    )
    try:
        figures = measure(loaded, arguments)
    finally:
        loaded.core.close()
    for name, value in figures.items():
        if name != "rounds":
            sys.stdout.write(f"{name:22} {value:.4g}\n")
    if arguments.save_result:
        provenance.save(arguments.save_result, **figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder or `.gguf` file")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=48, help="steps a round")
    parser.add_argument("--rounds", type=int, default=5, help="of free and held requests, taking turns")
    parser.add_argument("--save-result", type=Path, metavar="PATH", help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
