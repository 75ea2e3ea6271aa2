"""Which tokens may come next, and what is added to their logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vllm_metal.engine.mlx.row_table import RowTable
from vllm_metal.engine.request import Request
from vllm_metal.structure.matcher import masks

#: In the place of a pending token: whatever it is.
_ANY = -1


class Constraints:
    """What holds for a request at every position lies in a table on the device. What depends on the position
    or on the tokens before it is looked up at every step, for those requests alone that ask for it. A request
    with a grammar may have no token pending.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._biases = RowTable(_bias, mx.float32)
        self.active = False

    def arrange(self, rows: Sequence[Request | None], vocab_size: int) -> None:
        """Make ready for steps of these rows."""
        self._vocab_size = vocab_size
        self.active = any(request and request.params.constrained for request in rows)
        biased = [request if request and _is_biased(request) else None for request in rows]
        self._biased = any(biased)
        if self._biased:
            self._biases.arrange(biased, vocab_size)
        else:
            self._biases.clear()
        self._matched = [
            (row, request.matcher) for row, request in enumerate(rows) if request and request.matcher
        ]
        self._watched = [
            (row, request) for row, request in enumerate(rows) if request and _is_watched(request)
        ]

    def apply(self, logits: mx.array, previous: mx.array, previous_rows: Mapping[Request, int]) -> mx.array:
        """`logits` [rows, vocabulary], those of forbidden tokens -inf.

        `previous` [its rows] are the tokens of the last step, pending for some, and `previous_rows` whose.
        """
        if self._biased:
            logits = logits + self._biases.array
        if self._matched:
            logits = mx.where(self._in_grammar(len(logits)), logits, -mx.inf)
        bans = [
            (row, token_id, pending, 0 if pending == _ANY else previous_rows[request])
            for row, request in self._watched
            for token_id, pending in self._bans(request)
            if 0 <= token_id < self._vocab_size
        ]
        if not bans:
            return logits
        row, token_id, pending, previous_row = mx.array(bans, mx.int32).T
        banned = (pending == _ANY) | (pending == previous[previous_row].astype(mx.int32))
        return logits.at[row, token_id].add(mx.where(banned, -mx.inf, 0.0))

    def _in_grammar(self, num_rows: int) -> mx.array:
        """Whether each token may come next [rows, vocabulary]."""
        rows, matchers = zip(*self._matched, strict=True)
        made = masks(matchers)
        # The model may have more logits than its tokenizer has tokens, or fewer.
        num_words = -(-self._vocab_size // 32)
        words = np.zeros((len(made) + 1, num_words), np.int32)
        words[:-1, : made.shape[1]] = made[:, :num_words]
        words[-1] = -1
        mask_of = np.full(num_rows, len(made))
        mask_of[list(rows)] = np.arange(len(made))
        bits = mx.array(words.view(np.uint32))[mx.array(mask_of)][:, :, None] >> mx.arange(
            32, dtype=mx.uint32
        )
        return (bits & 1).reshape(num_rows, -1)[:, : self._vocab_size].astype(mx.bool_)

    def _bans(self, request: Request) -> Iterator[tuple[int, int]]:
        """Tokens that may not come next, each with the pending token on which that depends."""
        if request.num_sampled_tokens < request.params.min_tokens:
            for token_id in request.params.end_token_ids(self._eos_token_ids):
                yield token_id, _ANY
        for *prefix, last in request.params.bad_words:
            if not prefix or len(prefix) > request.num_sampled_tokens:
                continue
            pending = prefix.pop() if request.num_pending_tokens else _ANY
            if request.token_ids[len(request.token_ids) - len(prefix) :] == prefix:
                yield last, pending


def _is_biased(request: Request) -> bool:
    params = request.params
    return bool(
        params.logit_bias or params.allowed_token_ids or any(len(word) == 1 for word in params.bad_words)
    )


def _is_watched(request: Request) -> bool:
    params = request.params
    return params.min_tokens > 0 or any(len(word) > 1 for word in params.bad_words)


def _bias(request: Request, vocab_size: int) -> NDArray[Any]:
    params = request.params
    row = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        row[:] = -np.inf
        row[_within(params.allowed_token_ids, vocab_size)] = 0.0
    row[_within([word[0] for word in params.bad_words if len(word) == 1], vocab_size)] = -np.inf
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < vocab_size:
            row[token_id] += bias
    return row


def _within(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Those that the model has a logit for: a tokenizer may know more."""
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
