"""Decoders that answer yes or no to whether a document fits a query, as Qwen3-Reranker was trained to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer as BackendTokenizer

from vllm_metal.engine.embedding_request import EmbeddingInput
from vllm_metal.engine.mlx import pooling
from vllm_metal.engine.mlx.embedding_tokenizer import bare, room_for_second
from vllm_metal.errors import UnsupportedModel

#: The model's own prompt, word for word: others change its scores.
_BEFORE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_QUERY = "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {}"
_DOCUMENT = "\n<Document>: "
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class JudgePairs:
    """Puts a query and a document into that prompt."""

    def __init__(self, backend: BackendTokenizer) -> None:
        self._backend = backend
        self._before, self._after = (each.ids for each in bare(backend, [_BEFORE, _AFTER]))

    def encode(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[EmbeddingInput]:
        asked = [_QUERY.format(query) + _DOCUMENT for query, _ in pairs]
        inputs = bare(
            self._backend, [start + document for start, (_, document) in zip(asked, pairs, strict=True)]
        )
        if max_tokens is not None:
            num_around = len(self._before) + len(self._after)
            for start in bare(self._backend, dict.fromkeys(asked)):
                room_for_second(max_tokens, num_around + len(start.ids))
            for each in inputs:
                each.truncate(max_tokens - num_around)
        return [EmbeddingInput(array("i", [*self._before, *each.ids, *self._after])) for each in inputs]


class YesNoHead:
    """The probability of "yes" where there is nothing but that and "no"."""

    normalizes = False

    def __init__(self, model: Any, backend: BackendTokenizer) -> None:
        """Raises UnsupportedModel where the tokenizer has no such words."""
        answers = [backend.token_to_id(answer) for answer in ("no", "yes")]
        if None in answers:
            raise UnsupportedModel("the model's tokenizer has no tokens `yes` and `no`, so it cannot judge")
        self._model = model
        self._answers = mx.array(answers)

    def __call__(self, hidden: mx.array, lengths: mx.array) -> mx.array:
        last = pooling.last(hidden, lengths)
        if "lm_head" in self._model:
            logits = self._model.lm_head(last)[:, self._answers]
        else:
            logits = last @ self._model.model.embed_tokens(self._answers).T
        no, yes = mx.split(logits.astype(mx.float32), 2, axis=-1)
        return mx.sigmoid(yes - no)
