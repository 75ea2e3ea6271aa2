"""Log probabilities of prompts' tokens: each comes of the row before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from vllm_metal.engine.core import PromptLogprobs
from vllm_metal.engine.mlx.logprobs import likely, token_logprobs
from vllm_metal.engine.outputs import TokenLogprobs
from vllm_metal.engine.request import Request

#: Rows over the vocabulary that are held in float32 at once.
_SLICE = 64


class StepPromptLogprobs:
    """What a step's requests that asked are told of their prompts. `scheduled` are the tokens it computes."""

    def __init__(self, scheduled: Mapping[Request, int]) -> None:
        self._positions = {
            request: positions
            for request, num_tokens in scheduled.items()
            if request.params.prompt_logprobs is not None and (positions := _told(request, num_tokens))
        }
        self._slices: list[tuple[Request, range, list[mx.array]]] = []

    @property
    def arrays(self) -> list[mx.array]:
        return [array for _, _, arrays in self._slices for array in arrays]

    def rows(self, offsets: Mapping[Request, int]) -> list[int]:
        """The rows that must be projected; `offsets` are the requests' first ones."""
        return [
            offsets[request] + position - 1 - request.num_computed_tokens
            for request, positions in self._positions.items()
            for position in positions
        ]

    def take(self, logits: mx.array) -> None:
        """`logits` [rows, vocabulary] of `rows`, in that order."""
        for request, positions in self._positions.items():
            self._tell(request, positions, logits[: len(positions)])
            logits = logits[len(positions) :]

    def take_chunk(self, request: Request, logits: mx.array) -> None:
        """`logits` [tokens, vocabulary] of tokens that `request` has scheduled, the first of them first."""
        if positions := self._positions.get(request):
            first = positions.start - 1 - request.num_computed_tokens
            self._tell(request, positions, logits[first : first + len(positions)])

    def read(self) -> dict[Request, PromptLogprobs]:
        """Wait for them."""
        read = {
            request: PromptLogprobs(positions.start, []) for request, positions in self._positions.items()
        }
        for request, positions, arrays in self._slices:
            columns = (cast(list[Any], array.tolist()) for array in arrays)
            for position, chosen, top_ids, top, rank in zip(positions, *columns, strict=True):
                told = TokenLogprobs(request.token_ids[position], chosen, likely(top_ids, top), rank)
                read[request].tokens.append(told)
        return read

    def _tell(self, request: Request, positions: range, logits: mx.array) -> None:
        for start in range(0, len(positions), _SLICE):
            part = positions[start : start + _SLICE]
            token_ids = mx.array([request.token_ids[position] for position in part])
            rows = logits[start : start + _SLICE].astype(mx.float32)
            told = token_logprobs(rows, token_ids, request.params.prompt_logprobs or 0)
            own = mx.take_along_axis(rows, token_ids[:, None], axis=-1)
            rank = 1 + mx.sum(rows > own, axis=-1)
            self._slices.append((request, part, [*told, rank]))


def _told(request: Request, num_tokens: int) -> range:
    """Positions of the prompt's tokens that the next `num_tokens` tell of, less those known already."""
    first = request.num_computed_tokens + 1
    num_known = 1 + len(request.prompt_logprobs)
    return range(max(first, num_known), min(first + num_tokens, request.num_prompt_tokens))
