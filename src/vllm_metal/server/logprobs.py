"""Log probabilities as OpenAI's API puts them, and those of prompts as vLLM does."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_metal.api.chat import ChatLogprobs, TokenLogprob, TopLogprob
from vllm_metal.api.completions import TextLogprobs
from vllm_metal.api.prompt_logprobs import PromptLogprob, PromptLogprobs
from vllm_metal.engine.async_engine import TokenBytes
from vllm_metal.engine.outputs import TokenLogprobs

#: Stands for minus infinity, and for what is no number, which JSON does not have.
_LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What tokens are called: by their text, or by their ids if `by_id`. One that adds no text has a name."""

    token_bytes: TokenBytes
    by_id: bool = False

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.by_id else _readable(self.token_bytes.spelling(token_id))


def of_chat(tokens: Sequence[TokenLogprobs], names: TokenNames) -> ChatLogprobs:
    """An entry for each token."""

    def told(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return names[token_id], _finite(logprob), list(names.token_bytes.spelling(token_id))

    return ChatLogprobs(
        [
            TokenLogprob(*told(each.token_id, each.logprob), [TopLogprob(*told(*top)) for top in each.top])
            for each in tokens
        ]
    )


def of_prompt(tokens: Sequence[TokenLogprobs], names: TokenNames, num_top: int) -> PromptLogprobs:
    """An entry for each token of a prompt, none for the first; `tokens` are those from the second on."""

    def told(token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
        return PromptLogprob(_finite(logprob), rank, names[token_id])

    entries: PromptLogprobs = [None]
    for each in tokens:
        likely = {str(top[0]): told(*top, rank) for rank, top in enumerate(each.top[:num_top], 1)}
        entries.append({str(each.token_id): told(each.token_id, each.logprob, each.rank), **likely})
    return entries


class TextLogprobsWriter:
    """For one choice of a completion, piece by piece: it knows how long the text is so far."""

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._bytes_of = names.token_bytes.__getitem__ if skip_special_tokens else names.token_bytes.spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def write(self, tokens: Sequence[TokenLogprobs]) -> TextLogprobs:
        """The next tokens. What was given is always among the top ones, as one more if need be."""
        written = TextLogprobs([], [], [], [])
        for each in tokens:
            top = {self._names[token_id]: _finite(logprob) for token_id, logprob in each.top}
            token, logprob = self._names[each.token_id], _finite(each.logprob)
            written.tokens.append(token)
            written.token_logprobs.append(logprob)
            written.top_logprobs.append({**top, token: logprob})
            written.text_offset.append(self._num_characters)
            self._advance(each.token_id)
        return written

    def write_prompt(
        self, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs], num_top: int, text: str
    ) -> TextLogprobs:
        """A prompt of this `text`; `tokens` are those from the second on."""
        self._advance(token_ids[0])
        written = self.write(
            [TokenLogprobs(each.token_id, each.logprob, each.top[:num_top]) for each in tokens]
        )
        written.tokens.insert(0, self._names[token_ids[0]])
        written.token_logprobs.insert(0, None)
        written.top_logprobs.insert(0, None)
        # A tokenizer that normalizes may have changed the text's length.
        written.text_offset = [min(offset, len(text)) for offset in (0, *written.text_offset)]
        self._num_characters = len(text)
        return written

    def _advance(self, token_id: int) -> None:
        self._num_characters += len(self._utf8.decode(self._bytes_of(token_id)))


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST


def _readable(spelling: bytes) -> str:
    try:
        return spelling.decode()
    except UnicodeDecodeError:  # a part of a character, which must not look like that of another token
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
