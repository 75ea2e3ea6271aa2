"""The engine of an embedding model without a thread: batches of whole inputs, computed piece by piece."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_metal.engine.device_turns import Turn
from vllm_metal.engine.embedding_pace import EmbeddingPace
from vllm_metal.engine.embedding_queue import EmbeddingQueue, Row, padded_length
from vllm_metal.engine.embedding_request import EmbeddingInput, EmbeddingOutput, EmbeddingRequest
from vllm_metal.engine.outputs import EngineStats, FinishReason

logger = logging.getLogger(__name__)

#: One batch may fail by what is in it; when so many do on end, nothing works.
_MAX_FAILURES = 3
_NOT_A_NUMBER = "the model's output for this request is not a number (NaN)"


class Forward(Protocol):
    """A batch that is being computed."""

    def advance(self, max_tokens: int) -> float:
        """Compute a piece worth `max_tokens` through the whole model, or the least there is; what it was
        worth.
        """

    @property
    def vectors(self) -> list[bytes | None] | None:
        """For each input, once the last piece is computed; None for what is not a number."""


class PoolingRunner(Protocol):
    def begin(self, inputs: Sequence[EmbeddingInput], length: int) -> Forward:
        """Nothing is computed yet. No input is longer than `length`, to which all are padded."""

    def rest(self) -> None:
        """Give back memory that only makes the next batch quicker."""

    def close(self) -> None:
        """Drop every array, on the thread that made them."""


@dataclass(slots=True)
class _Progress:
    """A request: vectors of its inputs, as far as they are there."""

    vectors: list[bytes]
    num_missing: int
    is_begun: bool = False


@dataclass(slots=True)
class _Batch:
    """`has_advanced` since others were last let pass."""

    rows: list[Row]
    forward: Forward | None = None
    has_advanced: bool = False


@dataclass(slots=True)
class _Figures:
    num_steps: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    finished: Counter[FinishReason] = field(default_factory=Counter)


class EmbeddingCore:
    """Each step computes one piece in a turn of its own. `max_tokens` bounds a batch, padding included, and
    `max_length` what an input is padded to.
    """

    def __init__(self, runner: PoolingRunner, turn: Turn, *, max_tokens: int, max_length: int) -> None:
        self.runner = runner
        self._turn = turn
        self._max_tokens = max_tokens
        self._max_length = max_length
        self._queue = EmbeddingQueue()
        self._pace = EmbeddingPace()
        self._requests: dict[str, _Progress] = {}
        #: One, and while that is of a text longer than a piece, one of shorter ones that passes it.
        self._batches: list[_Batch] = []
        self._num_failures = 0
        self._figures = _Figures()

    def add(self, request: EmbeddingRequest) -> None:
        num_inputs = len(request.inputs)
        self._requests[request.request_id] = _Progress([b""] * num_inputs, num_inputs)
        self._queue.add(request)

    def abort(self, request_id: str) -> None:
        """Drop what is left of a request whose client has gone; unknown and finished ones are ignored."""
        if request_id in self._requests:
            self._finish(request_id, FinishReason.ABORT)
        self._batches = [
            batch
            for batch in self._batches
            if any(row.request.request_id in self._requests for row in batch.rows)
        ]

    def has_work(self) -> bool:
        return bool(self._batches) or len(self._queue) > 0

    def step(self) -> list[EmbeddingOutput]:
        """Compute a piece; the requests that ended with it. Raises when batch after batch fails."""
        try:
            vectors = self._advance()
        except Exception as exc:
            return self._fail(exc)
        if vectors is None:
            return []
        self._num_failures = 0
        return self._deliver(vectors)

    def pause(self) -> None:
        """To be called when there is no work."""

    def rest(self) -> None:
        """To be called when there has been no work for a while."""
        if self._turn.others_step_s is None:  # they would have to get their memory anew
            self.runner.rest()

    def stats(self) -> EngineStats:
        num_running = sum(progress.is_begun for progress in self._requests.values())
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._requests) - num_running,
            num_steps=self._figures.num_steps,
            prompt_tokens=self._figures.num_tokens,
            busy_s=self._figures.busy_s,
            finished=dict(self._figures.finished),
        )

    def close(self) -> None:
        self._batches.clear()
        self.runner.close()
        self._turn.leave()

    def _advance(self) -> list[bytes | None] | None:
        """The vectors of the batch, once its last piece is computed."""
        with self._turn:
            began_s = time.perf_counter()
            allowance = self._pace.allowance(self._turn.others_step_s)
            if not self._batches or self._is_passed(allowance):
                # No larger than a piece, if that can be: the next text to come waits for all of it.
                self._batches.append(_Batch(self._queue.take(min(allowance, self._max_tokens))))
            batch = self._batches[-1]
            if batch.forward is None:
                batch.forward = self._begin(batch.rows)
            num_tokens = batch.forward.advance(allowance)
            batch.has_advanced = True
            duration_s = time.perf_counter() - began_s
        self._pace.observe(num_tokens, duration_s)
        self._figures.num_steps += 1
        self._figures.busy_s += duration_s
        return batch.forward.vectors

    def _is_passed(self, allowance: int) -> bool:
        """Whether the batch under way lets shorter texts pass: every second piece is its own."""
        [*others, batch] = self._batches
        next_length = self._queue.next_length
        if others or not batch.has_advanced or next_length is None or next_length > allowance:
            return False
        batch.has_advanced = False
        return True

    def _begin(self, rows: list[Row]) -> Forward:
        inputs = [row.request.inputs[row.position] for row in rows]
        for row in rows:
            self._requests[row.request.request_id].is_begun = True
        length = min(padded_length(max(len(each.token_ids) for each in inputs)), self._max_length)
        return self.runner.begin(inputs, length)

    def _deliver(self, vectors: list[bytes | None]) -> list[EmbeddingOutput]:
        rows = self._batches.pop().rows
        outputs = []
        for row, vector in zip(rows, vectors, strict=True):
            request_id = row.request.request_id
            progress = self._requests.get(request_id)
            if progress is None:
                continue
            if vector is None:
                outputs.append(EmbeddingOutput(request_id, error=_NOT_A_NUMBER))
                self._finish(request_id, FinishReason.ERROR)
                continue
            progress.vectors[row.position] = vector
            progress.num_missing -= 1
            self._figures.num_tokens += len(row.request.inputs[row.position].token_ids)
            if progress.num_missing == 0:
                outputs.append(EmbeddingOutput(request_id, progress.vectors))
                self._finish(request_id, FinishReason.STOP)
        return outputs

    def _fail(self, exc: Exception) -> list[EmbeddingOutput]:
        self._num_failures += 1
        if not self._batches or self._num_failures == _MAX_FAILURES:
            raise exc
        logger.exception("a batch failed; its requests end")
        rows = self._batches.pop().rows
        request_ids = {row.request.request_id for row in rows} & self._requests.keys()
        for request_id in request_ids:
            self._finish(request_id, FinishReason.ERROR)
        error = f"the model failed on this input: {type(exc).__name__}: {exc}"
        return [EmbeddingOutput(request_id, error=error) for request_id in request_ids]

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        del self._requests[request_id]
        self._queue.discard(request_id)
        self._figures.finished[reason] += 1
