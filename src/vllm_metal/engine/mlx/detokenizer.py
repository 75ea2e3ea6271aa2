"""Token ids to text, one id at a time, in the engine thread.

Every token stands for some bytes and one incremental UTF-8 decoder joins them: the cost per token is
constant, a character leaves when its last byte has come, and the thread that encodes is not disturbed.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from vllm_metal.errors import UnsupportedModel

# GPT-2's spelling of bytes: printable ones stand for themselves, the others follow from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(0x100)) - set(_PRINTABLE)))
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_CHARACTER_BYTES = 4


class TokenBytes(dict[int, bytes]):
    """The bytes that a token id adds to a text: none for special tokens and for ids past the vocabulary.

    Filled on first use. Raises UnsupportedModel for a tokenizer without a decoder.
    """

    def __init__(self, backend: BackendTokenizer) -> None:
        if backend.decoder is None:
            raise UnsupportedModel(
                "the model's tokenizer has no decoder, so its tokens cannot be turned into text",
                hint="pass the folder of a complete tokenizer with `--tokenizer`",
            )
        super().__init__()
        self._backend = backend
        self._decoder = backend.decoder
        decoder_types = _decoder_types(json.loads(self._decoder.__getstate__()))
        self._is_byte_level = "ByteLevel" in decoder_types
        self._has_byte_fallback = "ByteFallback" in decoder_types
        added_tokens = backend.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added_tokens.items() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        # Decoded behind another token, since many decoders strip the first space of a text.
        piece = self[token_id] = self._bytes_of(token_id, behind="a")
        return piece

    def spelling(self, token_id: int) -> bytes:
        """The bytes of a token, or the name of one that adds none to a text."""
        return self[token_id] or (self._backend.id_to_token(token_id) or "").encode()

    def at_start(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        return self._bytes_of(token_id, behind="")

    def _bytes_of(self, token_id: int, *, behind: str) -> bytes:
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token, which is spelled as it reads
                return token.encode()
        if self._has_byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        text: str = self._decoder.decode([behind, token] if behind else [token])
        return text.removeprefix(behind).encode()


class Detokenizer:
    """The text of one answer as the continuation of its prompt. Special tokens add nothing, or their names if
    they are not to be skipped or are among those of `visible`.

    A character is held back until it is whole. U+FFFD stands only for bytes that can no longer become one.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._token_bytes = token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._visible = visible
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = not any(token_bytes[token_id] for token_id in prompt_token_ids)
        # A prompt may end within a character; its bytes belong to the answer's first one.
        tail = prompt_token_ids[-_MAX_CHARACTER_BYTES:]
        self._utf8.decode(b"".join(token_bytes[token_id] for token_id in tail))

    def add(self, token_id: int) -> str:
        """The text that this token completes, often empty."""
        piece = self._token_bytes[token_id]
        if not piece:
            if self._skip_special_tokens and token_id not in self._visible:
                return ""
            piece = self._token_bytes.spelling(token_id)
        elif self._at_start:
            piece = self._token_bytes.at_start(token_id)
        self._at_start = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left of an unfinished character when the answer ends."""
        return self._utf8.decode(b"", final=True)


def _decoder_types(decoder: dict[str, Any]) -> set[str]:
    return {decoder["type"]}.union(*map(_decoder_types, decoder.get("decoders", [])))
