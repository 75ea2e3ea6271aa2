"""What requests of all endpoints that generate have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from vllm_metal.api import structured_outputs
from vllm_metal.api.keep_alive import KeepAlive
from vllm_metal.api.ranges import LOGIT_BIAS, LOGPROBS, RANGES, N
from vllm_metal.api.request_body import NUM_TOKENS, RequestBody
from vllm_metal.api.structured_outputs import Choices, ResponseFormat, Schema, StructuredOutputs
from vllm_metal.errors import InvalidRequest
from vllm_metal.structure.grammar import Grammar

Positive = Annotated[int, Meta(ge=1)]
StopStrings = Annotated[list[str], Meta(max_length=16)]
#: Each costs work in every step.
_FEW = Meta(max_length=1024)
Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], _FEW]
NumLogprobs = Annotated[int, LOGPROBS]


class StreamOptions(Struct):
    """`include_progress` asks for comments before the first token: `: progress` and a `Progress`. They are
    comments because OpenAI's clients take every event with data, whatever its name, for a chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_progress: bool | None = None


class Progress(Struct):
    """Of one choice. `queue_place` is 1 for the request that begins next, 0 for one that has."""

    index: int
    queue_place: int
    prefilled_tokens: int
    prompt_tokens: int


class GenerationRequest(RequestBody, kw_only=True):
    """What chats, completions and responses take."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "early_stopping": (False,),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "verbosity",
        }
    )

    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    temperature: Annotated[float, RANGES["temperature"]] | None = None
    top_p: Annotated[float, RANGES["top_p"]] | None = None
    top_k: Annotated[int, RANGES["top_k"]] | None = None
    min_p: Annotated[float, RANGES["min_p"]] | None = None
    presence_penalty: Annotated[float, RANGES["presence_penalty"]] | None = None
    frequency_penalty: Annotated[float, RANGES["frequency_penalty"]] | None = None
    repetition_penalty: Annotated[float, RANGES["repetition_penalty"]] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, LOGIT_BIAS]], _FEW] | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], NUM_TOKENS] | None = None
    bad_words: Words | None = None
    seed: int | None = None
    n: Annotated[int, N] = 1
    best_of: Annotated[int, N] | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, RANGES["min_tokens"]] | None = None
    stop: str | StopStrings | None = None
    stop_token_ids: Annotated[list[int], _FEW] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    skip_reading_prefix_cache: bool | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    keep_alive: KeepAlive | None = None

    def sampling(self) -> dict[str, Any]:
        """What the client asked of the sampler: SamplingParams' arguments, without those left open.

        `bad_words` are not among them, since only the model can tell their tokens. Raises InvalidRequest.
        """
        if self.best_of not in (None, self.n):
            raise InvalidRequest("`best_of` may only equal `n`", param="best_of")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "`truncate_prompt_tokens` must be at least 1, or -1", param="truncate_prompt_tokens"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "`prompt_logprobs` cannot be streamed",
                param="prompt_logprobs",
                hint="leave out `stream`, or ask a completion for `echo` and `logprobs`",
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": tuple(_with_token_ids(self.logit_bias)) if self.logit_bias else None,
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": tuple(stop) if stop else None,
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "prompt_logprobs": self.prompt_logprobs,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "skip_reading_prefix_cache": self.skip_reading_prefix_cache,
        }
        return {name: value for name, value in asked.items() if value is not None}

    def grammar(self) -> Grammar | None:
        """What the answer must follow. Raises InvalidRequest where several things are asked for."""
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            whitespace_pattern=self.guided_whitespace_pattern,
        )
        asked = guided.grammars("guided_")
        if self.structured_outputs is not None:
            asked += self.structured_outputs.grammars()
        if self.response_format is not None:
            asked += filter(None, [structured_outputs.of_response_format(self.response_format)])
        if len(asked) > 1:
            first, second, *_ = asked
            raise InvalidRequest(f"`{first.param}` cannot go with `{second.param}`", param=second.param)
        return asked[0] if asked else None


def _with_token_ids(logit_bias: dict[str, float]) -> Iterator[tuple[int, float]]:
    for key, bias in logit_bias.items():
        # More digits than any vocabulary takes are not worth reading.
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest("the keys of `logit_bias` must be token ids", param="logit_bias")
        yield int(key), bias
