"""A step on the device: its forward first, and its sampling once the tokens that it depends on are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from vllm_metal.engine.core import ModelRunnerOutput
from vllm_metal.engine.mlx.prompt_logprobs import StepPromptLogprobs
from vllm_metal.engine.mlx.sampler import SampledStep, Sampler
from vllm_metal.engine.request import Request


class Step:
    """`logits` [rows, vocabulary] of the requests of `rows`, None being padding, are to be sampled. What
    `state` holds is computed with them.
    """

    def __init__(
        self,
        sampler: Sampler,
        logits: mx.array | None,
        rows: Sequence[Request | None],
        prompt_logprobs: StepPromptLogprobs,
        state: list[Any],
    ) -> None:
        self.sampled = SampledStep.nothing()
        self._sampler = sampler
        self._logits = logits
        self._rows = rows
        self._prompt_logprobs = prompt_logprobs
        self._unbegun = [prompt_logprobs.arrays, state]
        if logits is None or any(request is not None and request.matcher for request in rows):
            # The device computes while masks are made.
            mx.async_eval([] if logits is None else logits, self._unbegun)
            self._unbegun = []

    def sample(self) -> None:
        if self._logits is None:
            return
        self.sampled = self._sampler.sample(self._logits, self._rows)
        mx.async_eval(self.sampled.arrays, self._unbegun)
        # KV that is held here would be copied when the next step writes to it.
        self._logits, self._unbegun = None, []

    def read(self) -> ModelRunnerOutput:
        output = self.sampled.read()
        output.prompt_logprobs = self._prompt_logprobs.read()
        return output
