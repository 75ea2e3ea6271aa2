"""Drives an EngineCore by hand over a tiny model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_metal.engine.core import EngineCore
from vllm_metal.engine.kv_cache_manager import KVCacheManager
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.mlx.model_runner import ModelRunner
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.outputs import RequestOutput
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import Scheduler


class IdDetokenizer:
    """Shows token 65 as `A`: enough to see what text an answer would have."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        pass

    def add(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: RequestOutput | None = None


def make_core(
    model: Any,
    *,
    batched: bool = True,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    kv_budget_bytes: int = 1 << 40,
    eos_token_ids: frozenset[int] = frozenset(),
) -> EngineCore:
    kv = KVCacheManager(kv_cache.measure(model), kv_budget_bytes)
    scheduler = Scheduler(kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    runner = ModelRunner(model, batched=batched)
    return EngineCore(scheduler, runner, OutputProcessor(IdDetokenizer, eos_token_ids))


def request(request_id: str, prompt: list[int], *, max_tokens: int = 12, **params: Any) -> Request:
    sampling = SamplingParams(**({"temperature": 0.0} | params))
    seed = sampling.seed if sampling.seed is not None else 0
    return Request(request_id, prompt, sampling, max_tokens=max_tokens, seed=seed)


def collect(outputs: Iterable[RequestOutput], answers: dict[str, Answer]) -> None:
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer())
        answer.token_ids += output.token_ids
        answer.text += output.text
        answer.last = output


def run(core: EngineCore, requests: list[Request], *, steps_between: int = 0) -> dict[str, Answer]:
    """Add `requests`, `steps_between` steps after each other, and step until all have ended."""
    answers: dict[str, Answer] = {}
    for new in requests:
        core.add_request(new)
        for _ in range(steps_between):
            collect(core.step(), answers)
    while core.has_work():
        collect(core.step(), answers)
    return answers


def solo(model: Any, new: Request, **core: Any) -> Answer:
    return run(make_core(model, **core), [new])[new.request_id]
