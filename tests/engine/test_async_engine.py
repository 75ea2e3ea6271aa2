"""AsyncEngine over a real tiny model on its own thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import mlx.core as mx
import pytest

import adapter_writer
import tiny_models
from engine_driver import make_core, request, solo
from vllm_metal.engine import engine_thread
from vllm_metal.engine.async_engine import AsyncEngine, LoadedEngine, NewRequest
from vllm_metal.engine.mlx import adapted_layers
from vllm_metal.engine.outputs import FinishReason
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import EngineBusy, EngineUnavailable, InvalidRequest, NotAModel, PromptTooLong

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


class IdTokenizer:
    vocab_size = tiny_models.VOCAB_SIZE
    token_bytes = None

    def encode(self, text, *, add_special_tokens=True, max_tokens=None, only_end=False, param="prompt"):
        return [ord(character) for character in text]

    def render_chat(self, messages, *, add_generation_prompt=True, **variables):
        return messages[-1]["content"]


def load(name: str = "llama", **core) -> LoadedEngine:
    return LoadedEngine(make_core(tiny_models.make(name), **core), IdTokenizer(), max_model_len=256)


async def start(load=load, *, max_queued=8, seed=None) -> AsyncEngine:
    engine = AsyncEngine(load, max_queued=max_queued, seed=seed)
    await engine.start()
    return engine


def add(engine, name, prompt, params, **options):
    return engine.add_requests([NewRequest(name, prompt, params)], **options)


async def ask(engine, name, prompt, params=GREEDY, **options):
    token_ids, last = [], None
    async with add(engine, name, prompt, params, **options) as stream:
        async for [output] in stream:
            token_ids += output.token_ids
            last = output
    return token_ids, last


def test_no_other_text_waits_for_a_long_one():
    at_work, may_end = threading.Event(), threading.Event()

    class Waiting(IdTokenizer):
        def encode(self, text, **options):
            if len(text) > 1000:
                at_work.set()
                may_end.wait(60)
            return [1]

    async def main():
        engine = await start(lambda: replace(load(), tokenizer=Waiting()))
        try:
            long = asyncio.create_task(engine.encode_chat([{"role": "user", "content": "x" * 100_000}]))
            await asyncio.to_thread(at_work.wait, 60)
            assert await engine.encode("short") == [1]
            assert await engine.encode_chat([{"role": "user", "content": "short"}]) == [1]
            assert not long.done()
        finally:
            may_end.set()
        assert await long == [1]
        await engine.stop()

    asyncio.run(main())


def test_concurrent_requests_get_what_each_gets_alone():
    prompts = [[5, 6, 7], [1] * 30, [250, 3], [9] * 70, [4], [8, 8, 9]]
    model = tiny_models.make("llama")
    expected = [solo(model, request("r", prompt)).token_ids for prompt in prompts]

    async def main():
        engine = await start()
        answers = await asyncio.gather(*(ask(engine, str(i), prompt) for i, prompt in enumerate(prompts)))
        await engine.stop()
        return answers

    for (token_ids, last), wanted in zip(asyncio.run(main()), expected, strict=True):
        assert token_ids == wanted
        assert last.finish_reason is FinishReason.LENGTH


def test_the_adapter_that_a_request_names_answers(tmp_path):
    folders = [
        adapter_writer.write_mlx(
            tmp_path / str(seed), adapter_writer.matrices(tiny_models.make("llama"), seed=seed)
        )
        for seed in (1, 2)
    ]

    def make_adapted():
        model = tiny_models.make("llama")
        adapted_layers.install(model, folders, mx.float32)
        return model

    def load_adapted():
        return LoadedEngine(make_core(make_adapted()), IdTokenizer(), 256, adapters=("first", "second"))

    models = ["second", None, "first", "the model itself"]
    prompt = [5, 6, 7]
    expected = [
        solo(make_adapted(), request("r", prompt, adapter=adapter)).token_ids for adapter in (2, 0, 1)
    ]
    assert len({tuple(token_ids) for token_ids in expected}) == 3

    async def main():
        engine = await start(load_adapted)
        answers = await asyncio.gather(*(ask(engine, str(model), prompt, model=model) for model in models))
        await engine.stop()
        return [token_ids for token_ids, _ in answers]

    assert asyncio.run(main()) == [*expected, expected[1]]


def test_with_less_kv_prompts_must_be_shorter_until_there_is_more_again():
    kv_bytes = []

    def load_slots():
        loaded = load(mode="fused", max_model_len=256)
        kv_bytes.append(loaded.core.scheduler.kv.num_bytes(256))
        return loaded

    async def main():
        engine = await start(load_slots)
        async with add(engine, "long", [1] * 200, SamplingParams(temperature=0.0)) as running:
            engine.set_kv_budget(0)
            while engine.max_model_len:
                await asyncio.sleep(0)
            with pytest.raises(PromptTooLong):
                add(engine, "refused", [1, 2], GREEDY)
            assert sum([len(output.token_ids) async for [output] in running]) == 56
        engine.set_kv_budget(kv_bytes[0])
        while engine.max_model_len != 256:
            await asyncio.sleep(0)
        assert len((await ask(engine, "next", [1, 2, 3]))[0]) == 12
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_leaving_a_stream_frees_its_memory():
    async def main():
        engine = await start()
        endless = SamplingParams(temperature=0.0)
        async with add(engine, "r", [1, 2, 3], endless) as stream:
            await anext(stream)
            assert engine.num_streams == 1
        assert engine.num_streams == 0
        # A later request's end comes after the abort in the inbox, so what it reports is the state since.
        await ask(engine, "next", [1])
        while engine.stats.kv_used_bytes:
            await asyncio.sleep(0)
        await engine.stop()
        return engine.stats

    stats = asyncio.run(asyncio.wait_for(main(), 30))
    assert stats.num_running == stats.num_waiting == 0


def test_leaving_a_stream_ends_all_its_requests():
    async def main():
        engine = await start()
        endless = SamplingParams(temperature=0.0)
        async with engine.add_requests([NewRequest(name, [1, 2], endless) for name in "abc"]) as stream:
            await anext(stream)
            assert engine.num_streams == 3
        assert engine.num_streams == 0
        await ask(engine, "next", [1])
        while engine.stats.kv_used_bytes:
            await asyncio.sleep(0)
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_all_requests_are_taken_or_none():
    async def main():
        engine = await start(max_queued=3)
        with pytest.raises(InvalidRequest, match="no more than 3"):
            engine.add_requests([NewRequest(name, [1], GREEDY) for name in "abcd"])
        with pytest.raises(InvalidRequest, match="empty"):
            engine.add_requests([NewRequest("a", [1], GREEDY), NewRequest("b", [], GREEDY)])
        async with add(engine, "r", [1], SamplingParams()):
            with pytest.raises(EngineBusy):
                engine.add_requests([NewRequest(name, [1], GREEDY) for name in "abc"])
            assert engine.num_streams == 1
        await engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "mode"), [("llama", "fused"), ("llama", "serial"), ("mamba2", "split")])
def test_requests_of_one_prompt_share_one_prefill(name, mode):
    def load_one():
        core = make_core(tiny_models.make(name), mode=mode)
        return LoadedEngine(core, IdTokenizer(), max_model_len=4096)

    async def main():
        engine = await start(load_one)
        prompt = [(7 * i + 3) % 256 for i in range(700)]
        lasts = {}
        async with engine.add_requests([NewRequest(name, prompt, GREEDY) for name in "abcd"]) as stream:
            async for outputs in stream:
                lasts |= {output.request_id: output for output in outputs}
        await engine.stop()
        return lasts

    lasts = asyncio.run(asyncio.wait_for(main(), 60))
    assert lasts["a"].num_cached_tokens == 0
    assert all(lasts[name].num_cached_tokens >= 512 for name in "bcd")


def read_late(params, *, num_read=None):
    """The outputs of a request that has ended before they are read, `num_read` at most."""

    async def main():
        engine = await start()
        outputs = []
        async with add(engine, "r", [1, 2, 3], params) as stream:
            while engine.num_streams:
                await asyncio.sleep(0)
            async for [output] in stream:
                outputs.append(output)
                if len(outputs) == num_read:
                    stream.end("r")
        await engine.stop()
        return outputs

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_a_slow_reader_holds_one_output_and_loses_nothing():
    (output,) = read_late(GREEDY)
    assert len(output.token_ids) == 12
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.text) == 12


def test_outputs_with_log_probabilities_stay_apart():
    params = replace(GREEDY, logprobs=0)
    outputs = read_late(params)
    assert (
        [len(output.logprobs) for output in outputs] == [len(output.text) for output in outputs] == 12 * [1]
    )
    assert [output.finished for output in outputs] == 11 * [False] + [True]
    assert len(read_late(params, num_read=3)) == 3


def test_what_can_never_run_is_refused_before_it_queues():
    async def main():
        engine = await start(max_queued=1)
        with pytest.raises(InvalidRequest, match="empty"):
            add(engine, "r", [], GREEDY)
        with pytest.raises(InvalidRequest, match="between 0 and 319"):
            add(engine, "r", [320], GREEDY)
        with pytest.raises(PromptTooLong, match="256 tokens"):
            add(engine, "r", [1] * 256, GREEDY)
        assert engine.num_streams == 0
        async with add(engine, "r", [1], SamplingParams()):
            with pytest.raises(EngineBusy):
                add(engine, "s", [1], GREEDY)
        await engine.stop()
        with pytest.raises(EngineUnavailable):
            add(engine, "r", [1], GREEDY)

    asyncio.run(main())


def test_max_tokens_is_cut_to_what_the_context_leaves():
    async def main():
        engine = await start()
        _, last = await ask(engine, "r", [1] * 250, SamplingParams(temperature=0.0, max_tokens=32000))
        await engine.stop()
        return last

    assert asyncio.run(main()).num_output_tokens == 6


def test_seeds():
    async def main(seed):
        engine = await start(seed=seed)
        free = SamplingParams(max_tokens=12)
        fixed = SamplingParams(max_tokens=12, seed=5)
        answers = [await ask(engine, name, [1, 2], free) for name in "ab"]
        answers += [await ask(engine, name, [1, 2], fixed) for name in "cd"]
        await engine.stop()
        return [token_ids for token_ids, _ in answers]

    free_one, free_two, fixed_one, fixed_two = asyncio.run(main(None))
    assert free_one != free_two
    assert fixed_one == fixed_two
    assert asyncio.run(main(7)) == asyncio.run(main(7))


def counting_rests(rests: SimpleQueue):
    """Loads an engine that tells how many tokens it had made each time it rested."""
    loaded = load()
    rest = loaded.core.rest

    def told() -> None:
        rest()
        rests.put(loaded.core.stats().generation_tokens)

    loaded.core.rest = told
    return loaded


def test_memory_is_held_for_the_next_request():
    rests = SimpleQueue()

    async def main():
        engine = await start(partial(counting_rests, rests))
        for name in "ab":
            await ask(engine, name, [1, 2])
        await engine.stop()

    asyncio.run(main())
    assert rests.qsize() == 1  # after loading


def test_without_work_for_a_while_memory_is_given_back(monkeypatch):
    monkeypatch.setattr(engine_thread, "REST_AFTER_S", 0.0)
    rests = SimpleQueue()

    async def main():
        engine = await start(partial(counting_rests, rests))
        for num_tokens, name in ((12, "a"), (24, "b")):
            await ask(engine, name, [1, 2])
            while rests.get(timeout=60) < num_tokens:
                pass
        await engine.stop()

    asyncio.run(main())


def test_a_model_that_does_not_load_says_why():
    def broken():
        raise NotAModel("there is nothing here")

    with pytest.raises(NotAModel, match="nothing here"):
        asyncio.run(start(broken))


def test_who_knows_why_a_load_failed_keeps_nothing_of_the_model():
    models = []

    def broken():
        model = tiny_models.make("llama")
        models.append(weakref.ref(model))
        try:
            raise ValueError(f"{len(model.layers)} layers")
        except ValueError as exc:
            raise NotAModel("it cannot be run") from exc

    with pytest.raises(NotAModel) as told:
        asyncio.run(start(broken))
    gc.collect()
    assert told.value.__traceback__ is not None
    assert [model() for model in models] == [None]


def test_an_engine_that_fails_ends_its_streams_and_takes_no_more(caplog):
    def fragile():
        loaded = load()
        launch, calls = loaded.core.runner.launch, []

        def launch_twice(output):
            calls.append(output)
            if len(calls) > 2:
                raise RuntimeError("the device is gone")
            return launch(output)

        loaded.core.runner.launch = launch_twice
        return loaded

    async def main():
        engine = await start(fragile)
        answers = await asyncio.gather(*(ask(engine, name, [1, 2]) for name in "abc"))
        await engine.failed.wait()
        with pytest.raises(EngineUnavailable, match="device is gone"):
            add(engine, "d", [1], GREEDY)
        await engine.stop()
        return answers

    for _, last in asyncio.run(main()):
        assert last.finish_reason is FinishReason.ERROR
        assert "the device is gone" in last.error


def test_many_engines_come_and_go():
    """An engine thread that ends with arrays or streams alive aborts the process."""

    async def main():
        for name in ("llama", "mamba2"):
            engine = await start(partial(load, name))
            await ask(engine, "r", [1, 2, 3])
            await engine.stop()

    asyncio.run(main())


def test_stopping_ends_the_streams_that_are_left():
    async def main():
        engine = await start()
        async with add(engine, "r", [1, 2, 3], SamplingParams()) as stream:
            await anext(stream)
            stopping = asyncio.create_task(engine.stop())
            outputs = [output async for [output] in stream]
        await stopping
        return outputs

    assert asyncio.run(asyncio.wait_for(main(), 30))[-1].finish_reason is FinishReason.ABORT
