"""Compiles grammars for one tokenizer, on threads of its own and within bounds of time and size."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from vllm_metal.errors import InvalidRequest
from vllm_metal.structure import lark
from vllm_metal.structure.grammar import Grammar
from vllm_metal.structure.matcher import Matcher
from vllm_metal.structure.number_length import NumberLength

#: Seconds after which a grammar is given up. Those of real clients take milliseconds.
TIMEOUT_S = 5.0
#: One that was given up keeps its thread until the library is done with it.
_NUM_THREADS = 4
_MOST_CACHED = 64
#: Fuel, states and sizes are below the library's own, so that no mask holds the engine thread up for more
#: than some tens of milliseconds; rows may be longer, for objects of a thousand optional properties.
_LIMITS = partial(
    LLParserLimits,
    max_items_in_row=20_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
#: Expressions of a client's own: a long one takes the library time and memory by the square, and no limit of
#: time stops it. Lists of strings and schemas need more.
_INITIAL_FUEL = {"regex": 20_000, "grammar": 20_000}
_DRAWN = re.compile(r"<|\d* *\|")
_NUMBERS_GOING_ON = r"[0-9.eE](.|\n)*"


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """Answers to any number of requests may follow it. Its matchers are copies of `beginning`."""

    beginning: LLMatcher
    num_words: int
    new_number_length: Callable[[], NumberLength | None]

    def matcher(self) -> Matcher:
        """For one answer, at its beginning."""
        return Matcher(self.beginning.deep_copy(), self.num_words, self.new_number_length())


class Compiler:
    """`tokenizer_json` gives the tokenizer in Hugging Face's format; `added_tokens` are the ids of its added
    tokens. It is read in the background, which takes up to a second of a processor: the first grammar waits.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        *,
        added_tokens: Mapping[str, int],
        eos_token_ids: Iterable[int],
    ) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._vocabulary = self._threads.submit(_Vocabulary, tokenizer_json, added_tokens, eos_token_ids)
        self._compiled = lru_cache(_MOST_CACHED)(self._compile)

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest for a grammar that is wrong, not supported, or takes too long."""
        await self._read_vocabulary(grammar.param)
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compiled, grammar)
        try:
            return await asyncio.wait_for(compiling, TIMEOUT_S)
        except TimeoutError:
            raise _refusal(grammar, f"it takes more than {TIMEOUT_S:.0f} seconds to compile") from None

    async def literal(self, param: str) -> Callable[[str], str]:
        """Makes Lark of texts, in which the model's special tokens stand for themselves. Raises
        InvalidRequest, naming `param`.
        """
        vocabulary = await self._read_vocabulary(param)
        return partial(lark.literal, special_token_ids=vocabulary.special_token_ids)

    def close(self) -> None:
        """Take no more grammars. What is being compiled is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read_vocabulary(self, param: str) -> _Vocabulary:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._vocabulary))
        except Exception as exc:
            raise InvalidRequest(
                f"this model's tokenizer cannot be held to a grammar: {_reason(str(exc))}", param=param
            ) from exc

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._vocabulary.result()
        try:
            source = lark.translate(grammar, vocabulary.special_token_ids)
            beginning = vocabulary.matcher(source, _INITIAL_FUEL.get(grammar.kind))
        except (ValueError, RecursionError) as exc:
            raise _refusal(grammar, str(exc)) from exc
        # The first mask is the dearest, and shows whether anything can match at all.
        if not beginning.is_error():
            fill_next_token_bitmask(beginning, vocabulary.new_mask())
        if beginning.is_error():
            raise _refusal(grammar, beginning.get_error())
        new_number_length = vocabulary.number_length if grammar.kind == "json_schema" else lambda: None
        return CompiledGrammar(beginning, vocabulary.num_words, new_number_length)


class _Vocabulary:
    """The model's tokens, as the library wants them."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        added_tokens: Mapping[str, int],
        eos_token_ids: Iterable[int],
    ) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json(), eos_token=sorted(eos_token_ids) or None)
        self.special_token_ids = {
            name: token_id
            for name, token_id in added_tokens.items()
            if self._tokenizer.is_special_token(token_id)
        }
        going_on = self.new_mask()
        fill_next_token_bitmask(self.matcher(LLMatcher.grammar_from_regex(_NUMBERS_GOING_ON)), going_on)
        self._numbers_going_on = going_on[0]
        self.num_words = going_on.shape[1]

    def new_mask(self) -> NDArray[np.int32]:
        mask: NDArray[np.int32] = allocate_token_bitmask(1, self._tokenizer.vocab_size)
        return mask

    def matcher(self, source: str, initial_fuel: int | None = None) -> LLMatcher:
        limits = _LIMITS(initial_lexer_fuel=initial_fuel)
        return LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

    def number_length(self) -> NumberLength:
        return NumberLength(lambda token_id: self._tokenizer.decode_bytes([token_id]), self._numbers_going_on)


def _refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"`{grammar.param}` cannot be followed: {_reason(reason)}", param=grammar.param)


def _reason(error: str) -> str:
    """The library's words on one line, without its drawings of where."""
    lines = (line.strip() for line in error.splitlines())
    told = "; ".join(line for line in lines if line.strip("^<>") and not _DRAWN.match(line))
    return told if len(told) <= 400 else f"{told[:400]}…"
