"""The real server and engine over a model that writes what a script says, a byte at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken

import tiny_folder
from vllm_metal.config import Config
from vllm_metal.engine.async_engine import AsyncEngine, LoadedEngine
from vllm_metal.engine.core import EngineCore, ModelRunnerOutput
from vllm_metal.engine.kv_cache_manager import KVCacheSpec, KVLayerGroup
from vllm_metal.engine.memory_budget import ModelNeed
from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.outputs import TokenLogprobs
from vllm_metal.engine.rectangular_kv_cache_manager import RectangularKVCacheManager
from vllm_metal.engine.request import Request
from vllm_metal.engine.scheduler import Scheduler, SchedulerOutput
from vllm_metal.engine.step_pace import StepPace
from vllm_metal.parsing.detection import Choice
from vllm_metal.parsing.output_formats import OutputFormats
from vllm_metal.parsing.reasoning_formats import REASONING_FORMATS
from vllm_metal.parsing.tool_formats import TOOL_FORMATS
from vllm_metal.server.model_loader import Measure, ServingEngine
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.run import running
from vllm_metal.settings import ModelsConfig, ServerConfig
from vllm_metal.structure.compiler import Compiler

NAME = "scripted"
#: \x01 begins a message, \x02 ends the last one; `opening` is what the template writes of the answer.
TEMPLATE = """\
{%- for tool in tools or [] %}\x01{{ tool | tojson }}{% endfor -%}
{%- for message in messages %}\x01{{ message.reasoning or '' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}\x02{{ opening or '' }}{% endif -%}"""


#: From the prompt, as the template wrote it, to the answer.
Script = Callable[[str], str]


def last_message(prompt: str) -> str:
    return prompt.rpartition("\x01")[2].partition("\x02")[0]


def tokenizer(special_tokens: frozenset[str]) -> Tokenizer:
    fast = tiny_folder.tokenizer()
    fast.backend_tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in sorted(special_tokens)]
    )
    return Tokenizer(fast, chat_template=TEMPLATE)


@dataclass(frozen=True)
class Step:
    requests: list[Request]
    runner: Runner

    def sample(self) -> None:
        pass

    def read(self) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        for request in self.requests:
            token_id = output.token_ids[request] = self.runner.next_token(request)
            if request.params.logprobs is not None:
                output.logprobs[request] = TokenLogprobs(token_id, -0.5)
        return output


class Runner:
    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._answers: dict[Request, list[int]] = {}

    def launch(self, output: SchedulerOutput) -> Step:
        scheduled = output.num_scheduled_tokens.items()
        return Step([request for request, num in scheduled if num == request.num_remaining_tokens], self)

    def next_token(self, request: Request) -> int:
        if (answer := self._answers.get(request)) is None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            shown = self._tokenizer.decode(prompt, skip_special_tokens=False)
            answer = self._tokenizer.encode(self._script(shown), add_special_tokens=False)
            self._answers[request] = answer
        written = request.num_output_tokens
        return answer[written] if written < len(answer) else min(self._tokenizer.eos_token_ids)

    def reset(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Loader:
    """What a `ModelManager` asks for engines, whatever lies in the folder."""

    load: Callable[[], LoadedEngine]

    async def measure(self, path: Path, config: Config) -> Measure:
        return Measure(ModelNeed(), device_bytes=1 << 40)

    def engine_type(self, path: Path) -> type[ServingEngine]:
        return AsyncEngine

    def engine(self, name: str, path: Path, config: Config, room_bytes: int) -> ServingEngine:
        return AsyncEngine(self.load, max_queued=config.server.max_queued, name=name)


def _load(formats: OutputFormats, script: Script, max_model_len: int) -> LoadedEngine:
    marks = frozenset[str]()
    for each in (formats.tools.format, formats.reasoning.format):
        marks |= each.visible_tokens if each else frozenset()
    own = tokenizer(marks)
    kv = RectangularKVCacheManager(KVCacheSpec((KVLayerGroup(1),)), 1 << 40)
    scheduler = Scheduler(kv, max_num_seqs=8, max_num_batched_tokens=4096, pace=StepPace(100.0, min_chunk=16))
    core = EngineCore(scheduler, Runner(own, script), OutputProcessor(own.detokenizer, own.eos_token_ids))
    grammars = Compiler(own.backend.to_str, added_tokens=own.added_tokens, eos_token_ids=own.eos_token_ids)
    need = ModelNeed(full_kv_bytes=1 << 30)
    return LoadedEngine(core, own, max_model_len, formats=formats, grammars=grammars, need=need)


@contextmanager
def serving(
    tools: str | None,
    reasoning: str | None = None,
    *,
    script: Script = last_message,
    max_model_len: int = 4096,
    **server: Any,
) -> Iterator[str]:
    """The URL of a server whose model has these formats, every mark of which is a special token."""
    formats = OutputFormats(
        Choice(TOOL_FORMATS[tools] if tools else None, "the test says so"),
        Choice(REASONING_FORMATS[reasoning] if reasoning else None, "the test says so"),
    )
    listening: Future[tuple[str, Callable[[], object]]] = Future()

    async def serve(config: Config) -> None:
        manager = ModelManager(config, loader=Loader(lambda: _load(formats, script, max_model_len)))
        async with running(config, manager) as [url, *_]:
            await manager.settled()
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            listening.set_result((url, lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        model = tiny_folder.save(Path(folder, NAME))
        config = Config(server=ServerConfig(**{"port": 0, **server}), models=ModelsConfig(default=str(model)))
        served = thread.submit(asyncio.run, serve(config))
        wait([served, listening], return_when=FIRST_COMPLETED)
        if served.done():
            served.result()
        url, stop = listening.result()
        try:
            yield url
        finally:
            stop()
            served.result()
