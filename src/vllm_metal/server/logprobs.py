"""Log probabilities as OpenAI's API puts them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from vllm_metal.api.chat import ChatLogprobs, TokenLogprob, TopLogprob
from vllm_metal.api.completions import TextLogprobs
from vllm_metal.engine.async_engine import TokenBytes
from vllm_metal.engine.outputs import TokenLogprobs

#: Stands for minus infinity, which JSON does not have.
_LEAST = -9999.0


def of_chat(tokens: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> ChatLogprobs:
    """An entry for each token; one that adds no text goes by its name."""

    def spelled(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        spelling = token_bytes.spelling(token_id)
        return _readable(spelling), max(logprob, _LEAST), list(spelling)

    return ChatLogprobs(
        [
            TokenLogprob(
                *spelled(each.token_id, each.logprob), [TopLogprob(*spelled(*top)) for top in each.top]
            )
            for each in tokens
        ]
    )


class TextLogprobsWriter:
    """For the completions of one answer, piece by piece: it knows how long the text is so far."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def write(self, tokens: Sequence[TokenLogprobs]) -> TextLogprobs:
        """The next tokens. What was given is always among the top ones, as one more if need be."""
        written = TextLogprobs([], [], [], [])
        for each in tokens:
            top = {self._readable(token_id): max(logprob, _LEAST) for token_id, logprob in each.top}
            token, logprob = self._readable(each.token_id), max(each.logprob, _LEAST)
            written.tokens.append(token)
            written.token_logprobs.append(logprob)
            written.top_logprobs.append({**top, token: logprob})
            written.text_offset.append(self._num_characters)
            self._num_characters += len(self._utf8.decode(self._token_bytes[each.token_id]))
        return written

    def _readable(self, token_id: int) -> str:
        return _readable(self._token_bytes.spelling(token_id))


def _readable(spelling: bytes) -> str:
    try:
        return spelling.decode()
    except UnicodeDecodeError:  # a part of a character, which must not look like that of another token
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
