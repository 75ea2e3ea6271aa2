"""What vLLM's API tells of the tokens of a prompt."""

from __future__ import annotations

from msgspec import Struct


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str


#: For each token of the prompt, by id, itself and the likeliest ones; nothing for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]
