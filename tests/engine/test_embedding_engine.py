"""EmbeddingEngine: from the event loop to its thread and back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from embedding_script import ScriptedForward, ScriptedRunner, vector_of
from vllm_metal.engine import embedding_engine
from vllm_metal.engine.device_turns import DeviceTurns
from vllm_metal.engine.embedding_core import EmbeddingCore
from vllm_metal.engine.embedding_engine import EmbeddingEngine, LoadedEmbedder
from vllm_metal.engine.embedding_request import EmbeddingInput
from vllm_metal.engine.embedding_traits import EmbeddingTraits
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelError,
    PromptTooLong,
)


class ByteEncoder:
    vocab_size = 256

    def encode(self, texts: Sequence[str], max_tokens: int | None) -> list[EmbeddingInput]:
        return [EmbeddingInput(list(text.encode()[:max_tokens])) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[EmbeddingInput]:
        return self.encode([first + second for first, second in pairs], max_tokens)

    def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        return [text[:max_tokens] for text in texts]


class HeldEncoder(ByteEncoder):
    """Encodes nothing until it is let, and counts how often it is asked."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.num_calls = 0

    def encode(self, texts: Sequence[str], max_tokens: int | None) -> list[EmbeddingInput]:
        assert self.may_go.wait(60)
        self.num_calls += 1
        return super().encode(texts, max_tokens)


class HeldRunner(ScriptedRunner):
    """Computes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()

    def begin(self, inputs: Sequence[EmbeddingInput], length: int) -> ScriptedForward:
        assert self.may_go.wait(60)
        return super().begin(inputs, length)


def with_engine(
    runner: ScriptedRunner,
    use: Callable[[EmbeddingEngine], Awaitable[None]],
    *,
    max_queued: int = 8,
    encoder: ByteEncoder | None = None,
) -> None:
    def load() -> LoadedEmbedder:
        core = EmbeddingCore(runner, DeviceTurns().join(), max_tokens=64, max_length=32)
        return LoadedEmbedder(core, encoder or ByteEncoder(), EmbeddingTraits(max_model_len=32, dimensions=1))

    async def main() -> None:
        engine = EmbeddingEngine(load, max_queued=max_queued)
        await engine.start()
        try:
            await use(engine)
        finally:
            await engine.stop()
        assert runner.closed

    asyncio.run(main())


def test_texts_become_vectors():
    async def use(engine: EmbeddingEngine) -> None:
        inputs = await engine.encode([f"text {number}" for number in range(200)])
        engine.check(inputs, "input")
        assert await engine.compute(inputs) == list(map(vector_of, inputs))
        assert engine.num_streams == 0

    with_engine(ScriptedRunner(), use)


def test_a_caller_that_is_cancelled_is_computed_no_more():
    runner = HeldRunner()

    async def use(engine: EmbeddingEngine) -> None:
        first = asyncio.create_task(engine.compute([EmbeddingInput([1])]))
        second = asyncio.create_task(engine.compute([EmbeddingInput([2])]))
        await asyncio.sleep(0)
        assert engine.num_streams == 2
        second.cancel()
        await asyncio.wait([second])
        runner.may_go.set()
        assert await first == [vector_of(EmbeddingInput([1]))]
        assert engine.num_streams == 0

    with_engine(runner, use)


def test_a_full_queue_is_refused():
    runner = HeldRunner()

    async def use(engine: EmbeddingEngine) -> None:
        running = asyncio.create_task(engine.compute([EmbeddingInput([1])]))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await engine.compute([EmbeddingInput([2])])
        runner.may_go.set()
        await running

    with_engine(runner, use, max_queued=1)


def test_a_queue_of_too_many_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(embedding_engine, "_MAX_QUEUED_TOKENS", 10)
    runner = HeldRunner()

    async def use(engine: EmbeddingEngine) -> None:
        running = asyncio.create_task(engine.compute([EmbeddingInput([1] * 20)]))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="10 tokens"):
            await engine.compute([EmbeddingInput([2])])
        runner.may_go.set()
        assert len(await running) == 1

    with_engine(runner, use)


def test_requests_whose_texts_are_being_encoded_count():
    encoder = HeldEncoder()

    async def use(engine: EmbeddingEngine) -> None:
        encoding = asyncio.create_task(engine.encode(["a"]))
        await asyncio.sleep(0)
        assert (engine.num_streams, engine.num_waiting, engine.idle_s) == (1, 1, 0.0)
        with pytest.raises(EngineBusy):
            engine.check_room()
        encoder.may_go.set()
        # Its own place is not refused to who has waited for it.
        assert len(await engine.compute(await encoding)) == 1
        assert engine.num_streams == 0

    with_engine(ScriptedRunner(), use, max_queued=1, encoder=encoder)


def test_long_texts_are_encoded_one_by_one_and_short_ones_together():
    encoder = HeldEncoder()
    encoder.may_go.set()

    async def use(engine: EmbeddingEngine) -> None:
        texts = ["a" * 100_000] * 3 + ["b"] * 65 + ["c" * 100_000]
        inputs = await engine.encode(texts, max_tokens=3)
        assert [len(each.token_ids) for each in inputs] == [3, 3, 3, *[1] * 65, 3]
        assert encoder.num_calls == 3 + 2

    with_engine(ScriptedRunner(), use, encoder=encoder)


def test_stopping_ends_those_whose_texts_are_being_encoded():
    encoder = HeldEncoder()

    async def use(engine: EmbeddingEngine) -> None:
        encoding = asyncio.create_task(engine.encode(["a"] * 200))
        await asyncio.sleep(0)
        await engine.stop()
        encoder.may_go.set()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await encoding
        assert engine.num_streams == 0

    with_engine(ScriptedRunner(), use, encoder=encoder)


def test_figures_are_of_now_and_not_of_the_last_answer():
    class BatchByBatch(ScriptedRunner):
        may_go = threading.Semaphore(1)

        def begin(self, inputs: Sequence[EmbeddingInput], length: int) -> ScriptedForward:
            assert self.may_go.acquire(timeout=60)
            return super().begin(inputs, length)

    runner = BatchByBatch()

    async def use(engine: EmbeddingEngine) -> None:
        # Batches are of two: a part of it is in steps and waits as well.
        leaving = asyncio.create_task(engine.compute([EmbeddingInput([1] * 30)] * 5))
        while engine.stats.prompt_tokens != 60:
            await asyncio.sleep(0)
        assert (engine.num_running, engine.num_waiting) == (1, 0)
        leaving.cancel()
        await asyncio.wait([leaving])
        runner.may_go.release()
        while engine.stats.finished != {FinishReason.ABORT: 1}:
            await asyncio.sleep(0)
        assert engine.stats.num_running == engine.num_streams == 0

    with_engine(runner, lambda engine: asyncio.wait_for(use(engine), 60))


def test_a_deadline_gives_up():
    runner = HeldRunner()

    async def use(engine: EmbeddingEngine) -> None:
        with pytest.raises(DeadlineExceeded):
            await engine.compute([EmbeddingInput([1])], deadline=asyncio.get_running_loop().time())
        runner.may_go.set()
        assert len(await engine.compute([EmbeddingInput([2])])) == 1

    with_engine(runner, use)


def test_stopping_ends_those_who_wait():
    runner = HeldRunner()

    async def use(engine: EmbeddingEngine) -> None:
        running = asyncio.create_task(engine.compute([EmbeddingInput([1])]))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(runner.may_go.set)
        await engine.stop()
        with pytest.raises(EngineUnavailable):
            await running

    with_engine(runner, use)


def test_a_model_that_fails_on_end_fails_the_engine():
    async def use(engine: EmbeddingEngine) -> None:
        for _ in range(3):
            with pytest.raises(EngineError, match="out of memory"):
                await engine.compute([EmbeddingInput([13])])
        await engine.failed.wait()
        with pytest.raises(EngineUnavailable):
            await engine.compute([EmbeddingInput([1])])

    with_engine(ScriptedRunner(poison=13), use)


@pytest.mark.parametrize(
    ("token_ids", "error", "param"),
    [
        ([], InvalidRequest, "input[1]"),
        ([256], InvalidRequest, "input[1]"),
        ([-1], InvalidRequest, "input[1]"),
        ([1] * 33, PromptTooLong, "input[1]"),
    ],
)
def test_what_can_never_be_computed_is_refused(token_ids, error, param):
    async def use(engine: EmbeddingEngine) -> None:
        with pytest.raises(error) as caught:
            engine.check([EmbeddingInput([1]), EmbeddingInput(token_ids)], "input")
        assert caught.value.param == param

    with_engine(ScriptedRunner(), use)


def test_a_model_that_cannot_be_loaded_says_why():
    def load() -> LoadedEmbedder:
        raise ModelError("it is broken")

    async def main() -> None:
        engine = EmbeddingEngine(load, max_queued=1)
        with pytest.raises(ModelError, match="broken"):
            await engine.start()
        await engine.stop()

    asyncio.run(main())
