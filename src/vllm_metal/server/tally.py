"""Counts the tokens of a reply while they come."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from vllm_metal.api.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from vllm_metal.engine.async_engine import NewRequest
from vllm_metal.engine.outputs import FinishReason, RequestOutput
from vllm_metal.errors import EngineError, EngineUnavailable
from vllm_metal.server.thought_counter import ThoughtCounter


class Tally:
    """For `requests`, `num_choices` of each prompt. A prompt counts once. `thoughts` are counters for each
    request, or none where reasoning is not told apart by tokens.
    """

    def __init__(
        self, requests: Sequence[NewRequest], num_choices: int, thoughts: Sequence[ThoughtCounter] = ()
    ) -> None:
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._num_choices = num_choices
        self._thoughts = thoughts
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in requests[::num_choices])
        self._completion_tokens = [0] * len(requests)
        self._cached_tokens = [0] * len(requests)

    def count(self, output: RequestOutput) -> int:
        """The index of the choice that `output` is of. Raises the error that it stands for."""
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError(output.error or "the engine failed")
        if output.finish_reason is FinishReason.ABORT:
            raise EngineUnavailable("the server is shutting down")
        index = self._index[output.request_id]
        self._completion_tokens[index] = output.num_output_tokens
        self._cached_tokens[index] = output.num_cached_tokens
        if self._thoughts:
            self._thoughts[index].count(output.token_ids)
        return index

    @property
    def usage(self) -> Usage:
        """Of all that has been counted. Only first choices show what was kept of a prompt before it came."""
        completion_tokens = sum(self._completion_tokens)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens[:: self._num_choices])),
            completion_tokens_details=(
                CompletionTokensDetails(sum(each.num_tokens for each in self._thoughts))
                if self._thoughts
                else UNSET
            ),
        )
