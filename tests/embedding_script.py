"""A runner whose vectors are the sums of the inputs, computed in as many pieces as it is told."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from vllm_metal.engine.embedding_request import EmbeddingInput


def vector_of(each: EmbeddingInput) -> bytes:
    return struct.pack("<f", sum(each.token_ids))


class ScriptedForward:
    def __init__(self, runner: ScriptedRunner, inputs: Sequence[EmbeddingInput], length: int) -> None:
        self.vectors: list[bytes | None] | None = None
        self._runner = runner
        self._inputs = inputs
        self._left = len(inputs) * length

    def advance(self, max_tokens: int) -> float:
        self._runner.allowances.append(max_tokens)
        if self._runner.poison in {token_id for each in self._inputs for token_id in each.token_ids}:
            raise RuntimeError("out of memory")
        done = min(max_tokens, self._left)
        self._left -= done
        if self._left == 0:
            self.vectors = [
                None if self._runner.no_number in each.token_ids else vector_of(each) for each in self._inputs
            ]
        return done


class ScriptedRunner:
    """Fails on batches that hold the token `poison`, and has no positions past `max_length`. Of an input with
    the token `no_number` it makes none.
    """

    def __init__(self, *, poison: int = -1, no_number: int = -1, max_length: int = 512) -> None:
        self.poison = poison
        self.no_number = no_number
        self.max_length = max_length
        self.allowances: list[int] = []
        self.batches: list[Sequence[EmbeddingInput]] = []
        self.closed = False

    def begin(self, inputs: Sequence[EmbeddingInput], length: int) -> ScriptedForward:
        assert max(len(each.token_ids) for each in inputs) <= length <= self.max_length
        self.batches.append(inputs)
        return ScriptedForward(self, inputs, length)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
