"""Turns sampled tokens into text, and ends requests: the only loop over a step's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.engine.request import Request
from vllm_metal.engine.stop_strings import StopStrings


class Detokenizer(Protocol):
    """Token ids in, complete characters out; see `engine/mlx/detokenizer.py`."""

    def add(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _Text:
    __slots__ = ("detokenizer", "stops")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self.detokenizer = detokenizer
        self.stops = stops


class OutputProcessor:
    """`new_detokenizer` takes a prompt's token ids, since text may depend on what stands before it."""

    def __init__(
        self, new_detokenizer: Callable[[list[int]], Detokenizer], eos_token_ids: frozenset[int]
    ) -> None:
        self._new_detokenizer = new_detokenizer
        self._eos_token_ids = eos_token_ids
        self._texts: dict[Request, _Text] = {}

    def add(self, request: Request) -> None:
        detokenizer = self._new_detokenizer(request.token_ids)
        self._texts[request] = _Text(detokenizer, StopStrings(request.params.stop))

    def process(self, request: Request, token_id: int) -> RequestOutput:
        """The output for `token_id`, which `request` holds already; a `finish_reason` says it is the last."""
        text = self._texts[request]
        ended = self._is_end(request, token_id)
        delta = "" if ended else text.stops.feed(text.detokenizer.add(token_id))
        if not (ended or text.stops.stopped or request.num_output_tokens >= request.max_tokens):
            return self._output(request, delta, (token_id,), None)
        if not text.stops.stopped:
            # The last bytes may complete a stop string, or show that what was held is none.
            delta += text.stops.feed(text.detokenizer.flush()) + text.stops.flush()
        stopped = ended or text.stops.stopped
        return self._output(
            request, delta, (token_id,), FinishReason.STOP if stopped else FinishReason.LENGTH
        )

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The last output of a request that ends without a token of its own."""
        output = self._output(request, self._texts[request].stops.flush(), (), reason)
        output.error = error
        return output

    def remove(self, request: Request) -> None:
        self._texts.pop(request, None)

    def _is_end(self, request: Request, token_id: int) -> bool:
        if token_id in request.params.stop_token_ids:
            return True
        return token_id in self._eos_token_ids and not request.params.ignore_eos

    @staticmethod
    def _output(
        request: Request, text: str, token_ids: tuple[int, ...], reason: FinishReason | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
        )
