"""Turns sampled tokens into text, and ends requests: the only loop over a step's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm_metal.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from vllm_metal.engine.request import Request
from vllm_metal.engine.stop_strings import StopStrings


class Detokenizer(Protocol):
    """Token ids in, complete characters out; see `engine/mlx/detokenizer.py`."""

    def add(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _Text:
    __slots__ = ("detokenizer", "end_token_ids", "stops")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, end_token_ids: frozenset[int]) -> None:
        self.detokenizer = detokenizer
        self.stops = stops
        self.end_token_ids = end_token_ids


class OutputProcessor:
    """`new_detokenizer` takes a prompt's token ids, since text may depend on what stands before it, whether
    to skip special tokens, and the ids of those that show in any case.
    """

    def __init__(
        self,
        new_detokenizer: Callable[[list[int], bool, frozenset[int]], Detokenizer],
        eos_token_ids: frozenset[int],
    ) -> None:
        self._new_detokenizer = new_detokenizer
        self._eos_token_ids = eos_token_ids
        self._texts: dict[Request, _Text] = {}

    def add(self, request: Request) -> None:
        params = request.params
        detokenizer = self._new_detokenizer(
            request.token_ids, params.skip_special_tokens, params.visible_token_ids
        )
        stops = StopStrings(params.stop, included=params.include_stop_str_in_output)
        self._texts[request] = _Text(detokenizer, stops, params.end_token_ids(self._eos_token_ids))

    def process(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> RequestOutput:
        """The output for `token_id`, which `request` holds already; a `finish_reason` says it is the last."""
        text = self._texts[request]
        ended = token_id in text.end_token_ids
        shown = not ended or request.params.include_stop_str_in_output
        delta = text.detokenizer.add(token_id) if shown else ""
        # Like an end token, a stop string in the first `min_tokens` ends nothing.
        if request.num_output_tokens > request.params.min_tokens:
            delta = text.stops.feed(delta)
        # A grammar that nothing may follow ends the answer without an end token.
        ended = ended or (request.matcher is not None and request.matcher.is_complete)
        reason = None
        if ended or text.stops.stopped or request.num_output_tokens >= request.max_tokens:
            if not text.stops.stopped:
                # The last bytes may complete a stop string, or show that what was held is none.
                delta += text.stops.feed(text.detokenizer.flush()) + text.stops.flush()
            reason = FinishReason.STOP if ended or text.stops.stopped else FinishReason.LENGTH
        output = self._output(request, delta, reason)
        output.stop_string = text.stops.met
        output.token_ids = (token_id,)
        output.logprobs = (logprobs,) if logprobs else ()
        return output

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The last output of a request that ends without a token of its own."""
        output = self._output(request, self._texts[request].stops.flush(), reason)
        output.error = error
        return output

    def remove(self, request: Request) -> None:
        self._texts.pop(request, None)

    @staticmethod
    def _output(request: Request, text: str, reason: FinishReason | None) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
        )
