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


class HeldRunner(ScriptedRunner):
    """Computes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()

    def begin(self, inputs: Sequence[EmbeddingInput], length: int) -> ScriptedForward:
        assert self.may_go.wait(60)
        return super().begin(inputs, length)


def with_engine(
    runner: ScriptedRunner, use: Callable[[EmbeddingEngine], Awaitable[None]], *, max_queued: int = 8
) -> None:
    def load() -> LoadedEmbedder:
        core = EmbeddingCore(runner, DeviceTurns().join(), max_tokens=64, max_length=32)
        return LoadedEmbedder(core, ByteEncoder(), EmbeddingTraits(max_model_len=32, dimensions=1))

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
        assert engine.idle.is_set()
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
        assert engine.idle.is_set()

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
