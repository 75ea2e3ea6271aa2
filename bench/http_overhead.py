"""Processor time of all but the model, for which a stub stands: HTTP, tokenizing, scheduling, detokenizing.

python bench/http_overhead.py "$(metal pull smollm2)" [--save-result PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import provenance

from vllm_metal.bench import run
from vllm_metal.bench.client import Target
from vllm_metal.bench.load import Load
from vllm_metal.bench.record import RequestRecord
from vllm_metal.bench.statistics import percentile
from vllm_metal.config import Config
from vllm_metal.engine.async_engine import AsyncEngine, LoadedEngine
from vllm_metal.engine.core import EngineCore, ModelRunnerOutput
from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.memory_budget import ModelNeed
from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.engine.mlx.gguf_tokenizer import load_tokenizer
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import Scheduler, SchedulerOutput
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager
from vllm_metal.engine.step_pace import StepPace
from vllm_metal.server.model_loader import Measure, ServingEngine
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.run import running
from vllm_metal.settings import ModelsConfig, ServerConfig

TARGET_MS = 2
_NUM_ROWS = 32
_ANSWER = "The quick brown fox jumps over the lazy dog, and nobody is surprised. Où est la gare? 北京。\n"


@dataclass(slots=True)
class StubStep:
    """Takes `duration_s` of nobody's processor; every request gets the next token of the same text."""

    requests: list[Request]
    text: list[int]
    duration_s: float

    def sample(self) -> None:
        pass

    def read(self) -> ModelRunnerOutput:
        time.sleep(self.duration_s)
        text = self.text
        return ModelRunnerOutput(
            {request: text[request.num_output_tokens % len(text)] for request in self.requests}
        )


class StubRunner:
    """Notes the processor time between steps in which all rows decode."""

    def __init__(self, text: list[int], step_s: float) -> None:
        self.step_cpu_s: list[float] = []
        self._text = text
        self._step_s = step_s
        self._full_since_s: float | None = None

    def launch(self, output: SchedulerOutput) -> StubStep:
        now_s = time.process_time()
        if self._full_since_s is not None:
            self.step_cpu_s.append(now_s - self._full_since_s)
        is_full = output.num_decodes == _NUM_ROWS and not output.num_prefill_tokens
        self._full_since_s = now_s if is_full else None
        scheduled = output.num_scheduled_tokens.items()
        sampling = [
            request for request, num_tokens in scheduled if num_tokens == request.num_remaining_tokens
        ]
        return StubStep(sampling, self._text, self._step_s)

    def reset(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class StubLoader:
    """What a `ModelManager` asks for engines, for one that is there."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded

    async def measure(self, path: Path, config: Config) -> Measure:
        return Measure(self._loaded.need, device_bytes=1 << 40)

    def engine_type(self, path: Path) -> type[ServingEngine]:
        return AsyncEngine

    def engine(self, name: str, path: Path, config: Config, room_bytes: int) -> ServingEngine:
        return AsyncEngine(lambda: self._loaded, max_queued=config.server.max_queued, name=name)


def load_engine(gguf: Path, step_s: float) -> LoadedEngine:
    tokenizer = load_tokenizer(GGUFFile(gguf))
    kv = SlotKVCacheManager(
        KVCacheSpec((KVLayerGroup(1),)), 1 << 40, max_num_seqs=_NUM_ROWS, max_model_len=8192
    )
    scheduler = Scheduler(
        kv, max_num_seqs=_NUM_ROWS, max_num_batched_tokens=2048, pace=StepPace(100.0, min_chunk=256)
    )
    processor = OutputProcessor(tokenizer.detokenizer, tokenizer.eos_token_ids)
    runner = StubRunner(tokenizer.encode(_ANSWER), step_s)
    core = EngineCore(scheduler, runner, processor, overlap=True)
    return LoadedEngine(core, tokenizer, 8192, need=ModelNeed(full_kv_bytes=1 << 30))


def drive(url: str, load: Load) -> list[RequestRecord]:
    """In a process of its own, since only the server's time is of interest."""
    records: list[RequestRecord] = []
    asyncio.run(run.run(load, Target(url=url, endpoint_type="chat"), records))
    return records


async def measure(gguf: Path, load: Load, step_s: float) -> dict[str, float]:
    loaded = load_engine(gguf, step_s)
    spawn = multiprocessing.get_context("spawn")
    config = Config(server=ServerConfig(port=0), models=ModelsConfig(default=str(gguf)))
    manager = ModelManager(config, loader=StubLoader(loaded))
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        async with running(config, manager) as [url, *_]:
            await manager.settled()
            begin_s = time.process_time()
            records = await asyncio.get_running_loop().run_in_executor(pool, drive, url, load)
            cpu_s = time.process_time() - begin_s
    if errors := [record.error for record in records if record.error]:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    runner = loaded.core.runner
    assert isinstance(runner, StubRunner)
    step_cpu_ms = sorted(1e3 * each for each in runner.step_cpu_s)
    num_tokens = sum(record.output_tokens for record in records)
    return {
        "step_median_ms": percentile(step_cpu_ms, 50),
        "step_p99_ms": percentile(step_cpu_ms, 99),
        "all_ms_per_step": 1e3 * cpu_s / (num_tokens / _NUM_ROWS),
        "num_full_steps": len(step_cpu_ms),
        "tokens_per_chunk": num_tokens / sum(len(record.arrivals_s) for record in records),
    }


def main(arguments: argparse.Namespace) -> None:
    load = Load(
        num_prompts=arguments.num_prompts,
        input_words=(arguments.input_words,),
        output_len=(arguments.output_len,),
        max_concurrency=_NUM_ROWS,
    )
    figures = asyncio.run(measure(arguments.gguf, load, arguments.step_ms / 1e3))
    for name, figure in figures.items():
        sys.stdout.write(f"{name:<20}{figure:>10.2f}\n")
    if arguments.save_result is not None:
        provenance.save(arguments.save_result, target_ms=TARGET_MS, figures=figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "gguf", type=Path, help="whose tokenizer is used: the path that `metal pull smollm2` prints"
    )
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--input-words", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=20, help="how long the stub takes for a step")
    parser.add_argument("--save-result", type=Path, metavar="PATH")
    main(parser.parse_args())
