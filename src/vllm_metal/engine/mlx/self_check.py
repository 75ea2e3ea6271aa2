"""At load: which ways of running steps give this model's own logits? Decided by trying, never by its name."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from vllm_metal.engine.kv_cache_manager import KVCacheSpec
from vllm_metal.engine.mlx import adapters, kv_cache, soundness, twin
from vllm_metal.engine.mlx.fused_runner import FusedRunner
from vllm_metal.engine.mlx.layer_shapes import layer_shapes, slot_spec
from vllm_metal.engine.mlx.sampler import SampledStep
from vllm_metal.engine.mlx.split_runner import SplitRunner
from vllm_metal.engine.mlx.static_shapes import StaticShapes
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


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model gives by mlx-lm's own way of running one sequence: logits [tokens, vocabulary] of each of
    `texts` alone, with the adapter at its place in `used_adapters`.
    """

    model: Any
    texts: list[list[int]]
    used_adapters: list[int]
    logits: list[mx.array]

    @classmethod
    def of(cls, model: Any, vocab_size: int) -> Self | None:
        """None for a model that cannot be run."""
        own = adapters.of(model)
        lengths = [sum(step[which] for step in _STEPS) for which in range(2)]
        texts = [[(7 * i + 3 + 5 * which) % vocab_size for i in range(n)] for which, n in enumerate(lengths)]
        used = [(which + 1) % (1 + own.num_adapters) for which in range(2)]
        try:
            logits = [_logits(model, text, adapter) for text, adapter in zip(texts, used, strict=True)]
            mx.eval(logits)
        # It may fail in any way.
        except Exception as exc:
            logger.debug("the model cannot be run", exc_info=exc)
            return None
        return cls(model, texts, used, logits)

    @property
    def is_sound(self) -> bool:
        """Whether it is of numbers. Minus infinity is one, of a token that the model rules out."""
        return not any((mx.isnan(each) | (each == math.inf)).any() for each in self.logits)


def choose_mode(model: Any, config: dict[str, Any], vocab_size: int, *, path: Path) -> Mode:
    """The best mode that agrees with mlx-lm's own way of running one sequence; serial is that way.

    Raises ModelError for the model at `path` if by that way, too, it computes what is not a number.
    """
    references = [Reference.of(model, vocab_size)]
    if references[0] is not None and not references[0].is_sound:
        raise soundness.not_a_number(path, model)
    # A window is longer than what can be tried out on the model itself.
    if any(getattr(cache, "max_size", None) for cache in kv_cache.new_caches(model)):
        small = twin.make_twin(config)
        references.append(None if small is None else Reference.of(small, twin.VOCAB_SIZE))
    for mode in (Mode.FUSED, Mode.SPLIT):
        if all(reference is not None and agrees(reference, mode) for reference in references):
            return mode
    return Mode.SERIAL


def agrees(reference: Reference, mode: Mode) -> bool:
    """Run the texts side by side in `mode`, as requests, and compare all their logits."""
    model, texts, expected = reference.model, reference.texts, reference.logits
    requests = [
        Request(str(which), text[:length], SamplingParams(), max_tokens=len(text), seed=0, adapter=adapter)
        for which, (text, length, adapter) in enumerate(
            zip(texts, _PROMPTS, reference.used_adapters, strict=True)
        )
    ]
    recorder = _Recorder()
    differences = []
    try:
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


def _logits(model: Any, text: list[int], adapter: int) -> mx.array:
    """[tokens, vocabulary] of `text` alone."""
    with adapters.of(model).used_by(mx.array([adapter]) if adapter else None):
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
    return FusedRunner(model, layers, kv, recorder, static=StaticShapes.of_device())


def _close(own: mx.array, got: mx.array, tolerance: float) -> bool:
    own, got = own.astype(mx.float32), got.astype(mx.float32)
    spread = mx.max(own) - mx.min(own)
    return bool((mx.max(mx.abs(own - got)) <= tolerance * spread).item())
