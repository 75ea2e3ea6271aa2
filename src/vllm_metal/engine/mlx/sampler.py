"""All rows of a step sampled in one graph, in which nothing is computed that no row asks for.

Order, as in vLLM: what is allowed and biases, penalties, then the draw; log probabilities are of the model's
own logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from vllm_metal.engine.core import ModelRunnerOutput
from vllm_metal.engine.mlx.constraints import Constraints
from vllm_metal.engine.mlx.draw import Draw
from vllm_metal.engine.mlx.logprobs import Logprobs, StepLogprobs
from vllm_metal.engine.mlx.penalties import Penalties
from vllm_metal.engine.request import Request


class SampledStep:
    """Tokens that the device is sampling: `token_ids` and `valid` [rows]. Rows of no request are padding."""

    def __init__(
        self,
        rows: Sequence[Request | None],
        token_ids: mx.array,
        valid: mx.array,
        logprobs: StepLogprobs | None = None,
    ) -> None:
        self.row_of = {request: row for row, request in enumerate(rows) if request is not None}
        self.token_ids = token_ids
        self.valid = valid
        self.logprobs = logprobs

    @classmethod
    def nothing(cls) -> SampledStep:
        """A step that samples for no request."""
        return cls([None], mx.zeros(1, mx.uint32), mx.ones(1, mx.bool_))

    @property
    def arrays(self) -> list[mx.array]:
        """All that `read` waits for."""
        return [self.token_ids, self.valid, *(self.logprobs.arrays if self.logprobs else ())]

    def read(self) -> ModelRunnerOutput:
        """Wait for the tokens. A row of NaN is an error of its request."""
        output = ModelRunnerOutput()
        token_ids: list[int] = self.token_ids.tolist()  # type: ignore[assignment]
        valid: list[bool] = self.valid.tolist()  # type: ignore[assignment]
        for request, row in self.row_of.items():
            if valid[row]:
                output.token_ids[request] = token_ids[row]
            elif request.params.constrained:
                output.errors[request] = "the request allows none of the tokens that the model could give"
            else:
                output.errors[request] = "the model's output for this request is not a number (NaN)"
        if self.logprobs:
            output.logprobs = self.logprobs.read(output.token_ids)
        return output


class Sampler:
    """What depends on who is in the batch, but not on the position, is made ready when that changes.

    `candidates` is explained at `Draw`. `eos_token_ids` are the model's own end tokens.
    """

    def __init__(self, *, candidates: bool, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._candidates = candidates
        self._eos_token_ids = eos_token_ids
        self.reset()

    def reset(self) -> None:
        """Drop every array. What was sampled in steps that have not been read counts as never sampled."""
        self._rows: list[Request | None] = []
        self._previous = SampledStep.nothing()
        self._constraints = Constraints(self._eos_token_ids)
        self._penalties = Penalties()
        self._draw = Draw(candidates=self._candidates)
        self._logprobs = Logprobs()

    def sample(self, logits: mx.array, rows: Sequence[Request | None]) -> SampledStep:
        """Sample `logits` [rows, vocabulary] for the requests of the rows; None is a row of padding."""
        rows = list(rows)
        if rows != self._rows:
            self._arrange(rows, logits.shape[-1])
        logits = raw = logits.astype(mx.float32)
        # A NaN anywhere makes the row's sum NaN; masked tokens, minus infinity, do not.
        valid = ~mx.isnan(mx.sum(raw, axis=-1))
        if self._constraints.active:
            logits = self._constraints.apply(logits, self._previous.token_ids, self._previous.row_of)
            valid = valid & (mx.max(logits, axis=-1) > -mx.inf)
        if self._penalties.active:
            logits = self._penalties.apply(logits)
        token_ids = mx.argmax(logits, axis=-1)
        if self._draw.active:
            token_ids = self._draw.draw(logits, token_ids)
        if self._penalties.active:
            self._penalties.count(token_ids)
        logprobs = self._logprobs.of(raw, token_ids) if self._logprobs.active else None
        self._previous = SampledStep(rows, token_ids, valid, logprobs)
        return self._previous

    def _arrange(self, rows: list[Request | None], vocab_size: int) -> None:
        self._rows = rows
        self._constraints.arrange(rows, vocab_size)
        self._penalties.arrange(rows, vocab_size)
        self._draw.arrange(rows, vocab_size)
        self._logprobs.arrange(rows)
