"""Penalties for tokens that a request has seen already: repetition, then frequency and presence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vllm_metal.engine.mlx.row_table import RowTable
from vllm_metal.engine.request import Request


class Penalties:
    """Counts tokens on the device as they are sampled, since the host learns of them a step later."""

    def __init__(self) -> None:
        self._prompts = RowTable(_in_prompt, mx.bool_)
        self._counts = RowTable(_counts, mx.float32)
        self.active = False

    def arrange(self, rows: Sequence[Request | None], vocab_size: int) -> None:
        """Make ready for steps of these rows."""
        asking = [request if request and request.params.penalized else None for request in rows]
        self.active = any(asking)
        if not self.active:
            self._prompts.clear()
            self._counts.clear()
            return
        asked = [request.params if request else None for request in asking]
        packed = mx.array(
            [
                [params.repetition_penalty if params else 1.0 for params in asked],
                [params.frequency_penalty if params else 0.0 for params in asked],
                [params.presence_penalty if params else 0.0 for params in asked],
            ]
        )
        self._repetition, self._frequency, self._presence = packed[..., None]
        self._counts.arrange(asking, vocab_size)
        self._repeating = any(params and params.repetition_penalty != 1.0 for params in asked)
        if self._repeating:
            self._prompts.arrange(asking, vocab_size)
        else:
            self._prompts.clear()

    def apply(self, logits: mx.array) -> mx.array:
        """`logits` [rows, vocabulary], penalized: as in Keskar et al., 2019, and in OpenAI's API."""
        counts = self._counts.array
        written = counts > 0
        if self._repeating:
            penalized = mx.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits = mx.where(written | self._prompts.array, penalized, logits)
        return logits - self._frequency * counts - self._presence * written

    def count(self, token_ids: mx.array) -> None:
        """Take the tokens [rows] of this step into account from the next one on."""
        self._counts.array = self._counts.array.at[mx.arange(len(token_ids)), token_ids].add(1.0)


def _in_prompt(request: Request, vocab_size: int) -> NDArray[Any]:
    row = np.zeros(vocab_size, np.bool_)
    row[request.token_ids[: request.num_prompt_tokens]] = True
    return row


def _counts(request: Request, vocab_size: int) -> NDArray[Any]:
    assert not request.num_pending_tokens, "a token of unknown id cannot be counted"
    output_token_ids = np.array(request.token_ids[request.num_prompt_tokens :], np.int64)
    return np.bincount(output_token_ids, minlength=vocab_size).astype(np.float32)
