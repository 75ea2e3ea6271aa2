"""Texts to inputs of an embedding model, on any thread."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Encoding
from tokenizers import Tokenizer as BackendTokenizer

from vllm_metal.engine.embedding_request import EmbeddingInput
from vllm_metal.errors import InvalidRequest

#: More bytes than any token stands for but in texts of no language: what is behind so many is never read.
_MAX_TOKEN_BYTES = 256


class Pairs(Protocol):
    """How a model has two texts put to it."""

    def encode(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[EmbeddingInput]:
        """As `EmbeddingTokenizer.encode_pairs`, of texts that can be encoded."""


class EmbeddingTokenizer:
    """Adds the special tokens that the tokenizer has been told to, an end token among them, to what is cut
    as well.
    """

    def __init__(
        self, backend: BackendTokenizer, pairs: Pairs | None, max_model_len: int, num_embeddings: int
    ) -> None:
        self._backend = backend
        self._pairs = pairs
        self._max_bytes = max_model_len * _MAX_TOKEN_BYTES
        self.vocab_size = min(backend.get_vocab_size(with_added_tokens=True), num_embeddings)

    def encode(self, texts: Sequence[str], max_tokens: int | None) -> list[EmbeddingInput]:
        """Each cut to `max_tokens`, or whole. Raises InvalidRequest for a text that is not valid Unicode."""
        num_special = self._backend.num_special_tokens_to_add(False)
        inputs = []
        for encoding in bare(self._backend, map(self._readable, texts)):
            if max_tokens is not None:
                encoding.truncate(max(max_tokens - num_special, 0))
            inputs.append(EmbeddingInput(array("i", self._backend.post_process(encoding).ids)))
        return inputs

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[EmbeddingInput]:
        """The second of each is cut. Raises InvalidRequest as `encode` does, and for a first that leaves no
        room for the second.
        """
        assert self._pairs is not None
        readable = [(self._readable(first), self._readable(second)) for first, second in pairs]
        return self._pairs.encode(readable, max_tokens)

    def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """What the first `max_tokens` of each stand for. Raises InvalidRequest as `encode` does."""
        encodings = bare(self._backend, map(self._readable, texts))
        return [
            text[: each.offsets[max_tokens - 1][1]] if len(each.ids) > max_tokens else text
            for text, each in zip(texts, encodings, strict=True)
        ]

    def tokens(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Ids and strings of all of `text`. Raises InvalidRequest as `encode` does."""
        # A batch of one, because only for a batch the backend lets other threads run.
        [encoding] = self._backend.encode_batch([self._readable(text)], add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.tokens

    def text(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _readable(self, text: str) -> str:
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as exc:  # a lone surrogate, which JSON can spell
            raise InvalidRequest("the text is not valid Unicode: it holds half a surrogate pair") from exc
        return text if len(utf8) <= self._max_bytes else utf8[: self._max_bytes].decode(errors="ignore")


def bare(backend: BackendTokenizer, texts: Iterable[str]) -> list[Encoding]:
    """Without special tokens."""
    return backend.encode_batch(list(texts), add_special_tokens=False)


def room_for_second(max_tokens: int, num_others: int) -> int:
    """What the first text of a pair, and all else that is put with it, leave of `max_tokens`.

    Raises InvalidRequest where that is nothing.
    """
    if num_others >= max_tokens:
        raise InvalidRequest(
            f"the query, or first text, leaves no room for another in {max_tokens} tokens: with all that is "
            f"put around it, it has {num_others}",
            hint="shorten it, or let `truncate_prompt_tokens` be more",
        )
    return max_tokens - num_others


class EncoderPairs:
    """As the tokenizer joins two texts, for encoders."""

    def __init__(self, backend: BackendTokenizer) -> None:
        self._backend = backend

    def encode(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[EmbeddingInput]:
        # One query often stands before many documents.
        queries = list(dict.fromkeys(first for first, _ in pairs))
        firsts = dict(zip(queries, bare(self._backend, queries), strict=True))
        num_special = self._backend.num_special_tokens_to_add(True)
        inputs = []
        for (query, _), second in zip(pairs, bare(self._backend, [each for _, each in pairs]), strict=True):
            first = firsts[query]
            if max_tokens is not None:
                second.truncate(room_for_second(max_tokens, num_special + len(first.ids)))
            joined = self._backend.post_process(first, second)
            # Tokenizers whose model knows of one type of tokens give all of them that.
            second_start = joined.type_ids.index(1) if 1 in joined.type_ids else None
            inputs.append(EmbeddingInput(array("i", joined.ids), second_start))
        return inputs
