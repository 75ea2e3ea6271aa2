"""At load: which ways of running steps give this model's own logits? Decided by trying, never by its name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import mlx.core as mx

from vllm_metal.engine.kv_cache_manager import KVCacheSpec
from vllm_metal.engine.mlx import adapters, device, kv_cache, twin
from vllm_metal.engine.mlx.fused_runner import FusedRunner
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec
from vllm_metal.engine.mlx.sampler import SampledStep
from vllm_metal.engine.mlx.split_runner import SplitRunner
from vllm_metal.engine.rectangular_kv_cache_manager import RectangularKVCacheManager
from vllm_metal.engine.request import Request
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.scheduler import SchedulerOutput
from vllm_metal.engine.slot_kv_cache_manager import SlotKVCacheManager

logger = logging.getLogger(__name__)

#: Largest difference allowed, as a share of the logits' spread.
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE_HALF = 5e-2

#: Prompts of two requests, and the tokens each computes in each step: both begin, chunks, decodes.
_PROMPTS = (12, 9)
_STEPS = ((5, 4), (3, 0), (4, 0), (1, 5), (1, 1), (1, 1), (1, 1), (1, 1))


class Mode(StrEnum):
    """How steps are run, best first."""

    FUSED = "fused"
    SPLIT = "split"
    SERIAL = "serial"


def choose_mode(model: Any, config: dict[str, Any], vocab_size: int) -> Mode:
    """The best mode that agrees with mlx-lm's own way of running one sequence; serial is that way."""
    models = [(model, vocab_size)]
    # A window is longer than what can be tried out on the model itself.
    if any(getattr(cache, "max_size", None) for cache in kv_cache.new_caches(model)):
        models.append((twin.make_twin(config), twin.VOCAB_SIZE))
    for mode in (Mode.FUSED, Mode.SPLIT):
        if all(tried is not None and agrees(tried, mode, size) for tried, size in models):
            return mode
    return Mode.SERIAL


def agrees(model: Any, mode: Mode, vocab_size: int) -> bool:
    """Run two requests side by side in `mode` and alone through mlx-lm's caches; compare all their logits."""
    totals = [sum(step[which] for step in _STEPS) for which in range(2)]
    texts = [[(7 * i + 3 + 5 * which) % vocab_size for i in range(n)] for which, n in enumerate(totals)]
    requests = [
        Request(
            str(which),
            text[:length],
            SamplingParams(),
            max_tokens=len(text),
            seed=0,
            adapter=(which + 1) % (1 + adapters.of(model).num_adapters),
        )
        for which, (text, length) in enumerate(zip(texts, _PROMPTS, strict=True))
    ]
    recorder = _Recorder()
    differences = []
    try:
        expected = [_logits(model, text, request) for text, request in zip(texts, requests, strict=True)]
        runner = _runner(model, mode, recorder)
        if runner is None:
            return False
        for step in _STEPS:
            scheduled = {request: n for request, n in zip(requests, step, strict=True) if n}
            if isinstance(runner, FusedRunner) and not all(map(runner.kv.allocate, scheduled)):
                return False
            runner.launch(SchedulerOutput(scheduled)).sample()
            for request, num_tokens in scheduled.items():
                request.num_computed_tokens += num_tokens
            for request, logits in recorder.logits.items():
                which = requests.index(request)
                differences.append((expected[which][request.num_computed_tokens - 1], logits))
                # The next token is not what was sampled but what the text says.
                request.token_ids = texts[which][: request.num_computed_tokens + 1]
        tolerance = _TOLERANCE_FLOAT32 if expected[0].dtype == mx.float32 else _TOLERANCE_HALF
        return bool(differences) and all(_close(own, got, tolerance) for own, got in differences)
    # A model that cannot be run so may fail in any way.
    except Exception as exc:
        logger.debug("the check of %s mode raised", mode, exc_info=exc)
        return False


def _logits(model: Any, text: list[int], request: Request) -> mx.array:
    """[tokens, vocabulary] of `text` alone, with the adapter of `request`."""
    with adapters.of(model).used_by_requests([request]):
        logits: mx.array = model(mx.array([text]), cache=kv_cache.new_caches(model))
    return logits[0]


class _Recorder:
    """In the place of a sampler: keeps the logits of the last step."""

    def __init__(self) -> None:
        self.logits: dict[Request, mx.array] = {}

    def sample(self, logits: mx.array, rows: Sequence[Request | None]) -> SampledStep:
        self.logits = {request: logits[row] for row, request in enumerate(rows) if request is not None}
        return SampledStep(rows, mx.zeros(len(rows), mx.uint32), mx.ones(len(rows), mx.bool_))


def _runner(model: Any, mode: Mode, recorder: Any) -> FusedRunner | SplitRunner | None:
    if mode is Mode.SPLIT:
        mergeable = kv_cache.can_merge(kv_cache.new_caches(model))
        rectangle = RectangularKVCacheManager(KVCacheSpec(()), 1 << 60)
        return SplitRunner(model, rectangle, recorder, batched=True) if mergeable else None
    layers = layer_shapes(model)
    if layers is None:
        return None
    kv = SlotKVCacheManager(slot_spec(layers), 1 << 60, max_num_seqs=1024, max_model_len=64)
    return FusedRunner(model, layers, kv, recorder, static=not device.is_cpu())


def _close(own: mx.array, got: mx.array, tolerance: float) -> bool:
    own, got = own.astype(mx.float32), got.astype(mx.float32)
    spread = mx.max(own) - mx.min(own)
    return bool((mx.max(mx.abs(own - got)) <= tolerance * spread).item())
