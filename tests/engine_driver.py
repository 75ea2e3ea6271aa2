"""Drives an EngineCore by hand over a tiny model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_metal.engine.core import EngineCore
from vllm_metal.engine.device_turns import Turn
from vllm_metal.engine.kv_cache_manager import KVCacheManager
from vllm_metal.engine.mlx import kv_cache
from vllm_metal.engine.mlx.fused_runner import FusedRunner
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec
from vllm_metal.engine.mlx.sampler import Sampler
from vllm_metal.engine.mlx.split_runner import SplitRunner
from vllm_metal.engine.mlx.static_shapes import StaticShapes
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.outputs import RequestOutput, TokenLogprobs
from vllm_metal.engine.rectangular_kv_cache_manager import RectangularKVCacheManager
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import Scheduler
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager
from vllm_metal.engine.step_pace import StepPace

#: Ways to run a model, by name: what `make_core` is given.
MODES: dict[str, dict[str, Any]] = {
    "split": {"mode": "split"},
    "serial": {"mode": "serial"},
    "fused": {"mode": "fused"},
    "fused for Metal": {"mode": "fused", "static": StaticShapes.DECODES},
    "fused for CUDA": {"mode": "fused", "static": StaticShapes.ALL},
}


class IdDetokenizer:
    """Shows token 65 as `A`: enough to see what text an answer would have."""

    def __init__(
        self, prompt_token_ids: list[int], skip_special_tokens: bool, visible: frozenset[int]
    ) -> None:
        pass

    def add(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: RequestOutput | None = None


def make_core(
    model: Any,
    *,
    mode: str = "split",
    overlap: bool = False,
    static: StaticShapes = StaticShapes.NONE,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    kv_budget_bytes: int = 1 << 40,
    max_model_len: int = 4096,
    eos_token_ids: frozenset[int] = frozenset(),
    max_step_stretch: float = 100.0,
    chunk_grain: int = 1,
    turn: Turn | None = None,
) -> EngineCore:
    """`mode` is "fused", "split" or "serial"."""
    sampler = Sampler(candidates=not overlap, eos_token_ids=eos_token_ids)
    kv: KVCacheManager
    if mode == "fused":
        layers = layer_shapes(model)
        assert layers is not None
        kv = SlotKVCacheManager(
            slot_spec(layers),
            kv_budget_bytes,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            compact=static is StaticShapes.NONE,
            most_packed=static.most_dear_rows,
        )
        runner: Any = FusedRunner(model, layers, kv, sampler, static=static)
    else:
        kv = RectangularKVCacheManager(kv_cache.measure(model), kv_budget_bytes)
        runner = SplitRunner(model, kv, sampler, batched=mode == "split")
    scheduler = Scheduler(
        kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        pace=StepPace(max_step_stretch, min_chunk=1),
        chunk_grain=chunk_grain,
    )
    processor = OutputProcessor(IdDetokenizer, eos_token_ids)
    return EngineCore(scheduler, runner, processor, overlap=overlap, turn=turn)


def request(
    request_id: str, prompt: list[int], *, max_tokens: int = 12, adapter: int = 0, **params: Any
) -> Request:
    sampling = SamplingParams(**({"temperature": 0.0} | params))
    seed = sampling.seed if sampling.seed is not None else 0
    matcher = sampling.grammar.matcher() if sampling.grammar else None
    return Request(
        request_id, prompt, sampling, max_tokens=max_tokens, seed=seed, matcher=matcher, adapter=adapter
    )


def collect(outputs: Iterable[RequestOutput], answers: dict[str, Answer]) -> None:
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer())
        answer.token_ids += output.token_ids
        answer.text += output.text
        answer.logprobs += output.logprobs
        answer.prompt_logprobs += output.prompt_logprobs
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
