"""Who is loaded, who waits and who gives way, in virtual time and over engines that only keep count."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import virtual_loop
from vllm_metal import config
from vllm_metal.engine.memory_budget import ModelNeed, TooTight
from vllm_metal.engine.outputs import EngineStats
from vllm_metal.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InsufficientMemory,
    InvalidRequest,
    MetalError,
    ModelNotFound,
    NotAModel,
)
from vllm_metal.server.model_loader import Measure
from vllm_metal.server.model_manager import LOAD_WAIT_S, ModelManager

GB = 10**9
LOAD_S = 1.0
#: A turn of four loads.
TURN_S = 4.0


@dataclass(eq=False)
class Engine:
    """Takes its memory from the beginning of its load to the end of its unloading."""

    name: str
    loader: Loader
    need: ModelNeed
    purpose = "counts"
    max_model_len = 100
    summary = None
    failure: str | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    kv_budget: int | None = None
    num_users: int = 0
    is_there: bool = False

    def __post_init__(self) -> None:
        self.failed = asyncio.Event()

    @property
    def num_streams(self) -> int:
        return self.num_users

    num_running = num_streams
    num_waiting = 0
    idle_s = 0.0

    async def start(self) -> None:
        self.loader.took(self)
        await asyncio.sleep(self.loader.load_s)
        if error := self.loader.errors.get(self.name):
            self.loader.freed(self)
            raise error
        self.is_there = True

    async def stop(self) -> None:
        assert self.loader.is_closing or self.num_users == 0, "unloaded under a running request"
        self.is_there = False
        await asyncio.sleep(0.1)
        self.loader.freed(self)

    def set_kv_budget(self, num_bytes: int) -> None:
        self.kv_budget = num_bytes


class Loader:
    """Weights of a GB, unless `sizes` says otherwise, of a device that has room for two of these."""

    def __init__(self, *, device_bytes: int = 2 * GB, **sizes: int) -> None:
        self.device_bytes = device_bytes
        self.sizes = sizes
        self.load_s = LOAD_S
        self.is_closing = False
        self.errors: dict[str, MetalError] = {}
        self.engines: set[Engine] = set()
        self.loads: list[tuple[float, str]] = []

    async def measure(self, path: Path, of_model: config.Config) -> Measure:
        await asyncio.sleep(0)
        return Measure(self._need(path.name), self.device_bytes)

    def engine_type(self, path: Path) -> type[Any]:
        return Engine

    def engine(self, name: str, path: Path, of_model: config.Config, room_bytes: int) -> Any:
        assert room_bytes <= self.device_bytes
        return Engine(name, self, self._need(path.name))

    def _need(self, name: str) -> ModelNeed:
        return ModelNeed(weight_bytes=self.sizes.get(name, GB))

    def took(self, engine: Engine) -> None:
        assert engine.name not in {each.name for each in self.engines}, "loaded twice"
        self.engines.add(engine)
        self.loads.append((asyncio.get_running_loop().time(), engine.name))
        assert sum(each.need.weight_bytes for each in self.engines) <= self.device_bytes, "over the budget"

    def freed(self, engine: Engine) -> None:
        self.engines.remove(engine)

    def loads_of(self, name: str) -> int:
        return sum(each == name for _, each in self.loads)

    @property
    def resident(self) -> set[str]:
        return {engine.name for engine in self.engines}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four models that look whole enough."""
    path = tmp_path_factory.mktemp("models")
    for name in "abcd":
        (path / name).mkdir()
        (path / name / "config.json").write_text("{}")
        (path / name / "model.safetensors").write_bytes(b"x")
    return path


class Server:
    """A manager with model `a` as the default one, and what is asked of it."""

    def __init__(
        self, folder: Path, loader: Loader, text: str = "", *, models_dir: Path | None = None, **options: Any
    ) -> None:
        file = folder / f"{id(self)}.toml"
        file.write_text(
            f'[engine]\ngpu_memory_utilization = 1.0\n[models]\ndefault = "{folder / "a"}"\n'
            f'dir = "{models_dir or folder}"\n{text}'
        )
        self.loader = loader
        self.manager = ModelManager(config.load(path=file, environ={}), loader=loader, **options)
        file.unlink()
        self.manager.start()

    async def ask(
        self,
        name: str | None,
        for_s: float = 0.1,
        *,
        at_s: float = 0.0,
        keep_alive_s: float | None = None,
        deadline_s: float | None = None,
    ) -> float:
        """How long it took."""
        await asyncio.sleep(at_s)
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = None if deadline_s is None else began + deadline_s
        async with self.manager.acquire_a(
            Engine, name, deadline=deadline, keep_alive_s=keep_alive_s
        ) as engine:
            assert engine.name == (name or "a")
            assert engine.is_there
            engine.num_users += 1
            try:
                await asyncio.sleep(for_s)
                assert engine.is_there
            finally:
                engine.num_users -= 1
        return loop.time() - began

    def state(self, name: str) -> str:
        return next((model.state for model in self.manager.roster.models if model.name == name), "unknown")


def play(folder: Path, loader: Loader, script: Any, text: str = "", **options: Any) -> Any:
    async def main() -> Any:
        server = Server(folder, loader, text, **options)
        try:
            return await script(server)
        finally:
            loader.is_closing = True
            await server.manager.close()
            assert not loader.engines

    return virtual_loop.run(main())


def test_models_are_loaded_when_asked_for_and_stay(folder):
    async def script(server):
        for name in ("b", None, "a", "b"):
            await server.ask(name)
        return server.loader.loads

    loads = play(folder, Loader(), script)
    assert [name for _, name in loads] == ["a", "b"]


def test_requests_wait_for_the_one_load(folder):
    async def script(server):
        return await asyncio.gather(*(server.ask("b") for _ in range(20)))

    loader = Loader()
    times = play(folder, loader, script)
    assert loader.loads_of("b") == 1
    assert max(times) - min(times) < 0.01


def test_the_least_recently_used_gives_way(folder):
    async def script(server):
        for name in ("a", "b", "a"):
            await server.ask(name)
        await asyncio.sleep(TURN_S)
        await server.ask("c")
        return server.loader.resident

    assert play(folder, Loader(), script) == {"a", "c"}


def test_who_is_used_does_not_give_way_but_ends_first(folder):
    async def script(server):
        await server.ask("b")
        long = asyncio.create_task(server.ask("b", for_s=30.0))
        other = asyncio.create_task(server.ask("a", for_s=30.0))
        await asyncio.sleep(TURN_S)
        took = await server.ask("c")
        assert long.done() or other.done()
        await asyncio.gather(long, other)
        return took

    assert 30.0 - TURN_S < play(folder, Loader(), script) < 40.0


def test_a_pinned_model_never_gives_way(folder):
    async def script(server):
        await server.ask("a")
        for name in ("b", "c", "d", "b"):
            await asyncio.sleep(TURN_S)
            await server.ask(name)
        return server.loader

    loader = play(folder, Loader(), script, "pinned = true\n")
    assert loader.loads_of("a") == 1
    assert len(loader.loads) == 5


def test_one_that_can_never_fit_is_refused_with_the_setting_that_says_so(folder):
    async def script(server):
        await server.ask("a")
        with pytest.raises(
            InsufficientMemory, match=r"`b` needs 5.00 GB.*`engine.gpu_memory_utilization` = 1 "
        ):
            await server.ask("b")
        assert server.state("b") == "failed"
        # Beside the pinned one there is no room for this.
        with pytest.raises(InsufficientMemory, match="pinned models hold 1.00 GB"):
            await server.ask("c")
        return server.loader

    loader = play(folder, Loader(b=5 * GB, c=int(1.5 * GB)), script, "pinned = true\n")
    assert [name for _, name in loader.loads] == ["a"]


def test_a_large_one_makes_room_for_itself_and_no_more(folder):
    async def script(server):
        for name in "abc":
            await server.ask(name)
        await asyncio.sleep(TURN_S)
        await server.ask("d")
        return server.loader.resident

    sizes = {"a": GB // 2, "b": 2 * GB, "c": GB // 2, "d": 2 * GB}
    assert play(folder, Loader(device_bytes=3 * GB, **sizes), script) == {"a", "c", "d"}


def test_two_that_do_not_fit_together_take_turns(folder):
    """Each of many clients asks again at once; neither model is loaded for a single request."""

    async def client(server, name):
        for _ in range(50):
            await server.ask(name, for_s=0.5)

    async def script(server):
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(client(server, name) for name in "ab" for _ in range(4)))
        return asyncio.get_running_loop().time() - began

    loader = Loader(device_bytes=GB)
    took_s = play(folder, loader, script)
    names = [name for _, name in loader.loads]
    assert all(one != other for one, other in itertools.pairwise(names))
    # 2 x 50 x 0.5 s of work, and at most a quarter more for loads.
    assert len(loader.loads) <= took_s / (TURN_S + LOAD_S) + 2
    assert took_s < 50 * 1.5
    starts = [time for time, _ in loader.loads]
    assert all(late - early >= TURN_S for early, late in itertools.pairwise(starts[1:-1]))


def test_one_that_asks_in_turns_waits_no_longer_than_a_load_would_take_again(folder):
    async def script(server):
        return [await server.ask(name) for name in "abababab"]

    times = play(folder, Loader(device_bytes=GB), script)
    assert all(time_s < 2 * LOAD_S + 0.5 for time_s in times[1:])


def test_first_come_first_served_between_models(folder):
    async def script(server):
        await server.ask("a")
        order = []

        async def ask(name):
            await server.ask(name)
            order.append(name)

        tasks = []
        for name in "dcb":
            tasks.append(asyncio.create_task(ask(name)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        return order

    assert play(folder, Loader(device_bytes=GB), script) == ["d", "c", "b"]


def test_a_model_that_gives_way_takes_new_requests_again_when_nobody_waits_any_more(folder):
    async def script(server):
        await server.ask("a")
        long = asyncio.create_task(server.ask("a", for_s=100.0))
        await asyncio.sleep(TURN_S + 1)
        impatient = asyncio.create_task(server.ask("b"))
        await asyncio.sleep(1)
        held = asyncio.create_task(server.ask("a"))
        await asyncio.sleep(1)
        assert not held.done()
        impatient.cancel()
        await held
        long.cancel()
        return server.loader

    assert [name for _, name in play(folder, Loader(device_bytes=GB), script).loads] == ["a"]


def test_who_waits_too_long_is_told_to_come_back(folder):
    async def script(server):
        await server.ask("a")
        long = asyncio.create_task(server.ask("a", for_s=1000.0))
        await asyncio.sleep(TURN_S)
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineUnavailable, match="waits for memory") as told:
            await server.ask("b")
        assert asyncio.get_running_loop().time() - began == pytest.approx(LOAD_WAIT_S)
        assert told.value.retry_after_s > 0
        with pytest.raises(DeadlineExceeded, match="within its time limit: `b` is not ready: waits for"):
            await server.ask("b", deadline_s=3.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(LOAD_WAIT_S + 3.0)
        long.cancel()
        assert not [model for model in server.manager.roster.models if model.num_requests > 1]

    play(folder, Loader(device_bytes=GB), script)


def test_a_load_goes_on_when_all_who_wanted_it_have_left(folder):
    async def script(server):
        await server.ask("a")
        asking = asyncio.create_task(server.ask("b"))
        await asyncio.sleep(LOAD_S / 2)
        asking.cancel()
        await asyncio.sleep(LOAD_S)
        assert server.state("b") == "ok"
        assert await server.ask("b") < 0.2

    play(folder, Loader(), script)


def test_nobody_who_wants_it_no_more_has_it_loaded(folder):
    async def script(server):
        await server.ask("a")
        long = asyncio.create_task(server.ask("a", for_s=50.0))
        asking = asyncio.create_task(server.ask("b"))
        await asyncio.sleep(1)
        asking.cancel()
        await long
        await asyncio.sleep(10)
        return server.loader

    assert play(folder, Loader(device_bytes=GB), script).loads_of("b") == 0


def test_a_load_that_failed_is_answered_at_once_for_a_while_that_grows(folder):
    async def script(server):
        loop = asyncio.get_running_loop()
        server.loader.errors["b"] = NotAModel("`b` is broken", hint="mend it")
        began, loads = loop.time(), []
        while loop.time() < began + 100:
            before = loop.time()
            with pytest.raises(EngineUnavailable, match="`b` is broken") as told:
                await server.ask("b")
            assert told.value.hint == "mend it"
            assert 1 <= told.value.retry_after_s <= 300
            loads.append(loop.time() - before > LOAD_S / 2)
            await asyncio.sleep(1)
        assert server.loader.loads_of("b") == sum(loads) <= 6
        del server.loader.errors["b"]
        await asyncio.sleep(300)
        await server.ask("b")
        await server.ask("a")

    play(folder, Loader(), script)


@pytest.mark.parametrize("error", [NotAModel("broken"), InsufficientMemory("large")])
def test_a_failure_keeps_hold_of_none_who_were_told(folder, error):
    async def script(server):
        server.loader.errors["b"] = error
        told = []
        for _ in range(3):
            with pytest.raises(MetalError, match=error.message) as failed:
                await server.ask("b")
            told.append(failed.value)
        assert len(set(map(id, told))) == 3
        [failure] = [model.failure for model in server.manager.roster.models if model.failure]
        assert failure.error.__traceback__ is None

    play(folder, Loader(), script)


def test_idle_models_are_unloaded_after_their_time(folder):
    async def script(server):
        await server.ask("b")
        await server.ask("c", keep_alive_s=5.0)
        await server.ask("a")
        await asyncio.sleep(6)
        assert [server.state(name) for name in "abc"] == ["ok", "ok", "unloaded"]
        await asyncio.sleep(100)
        assert [server.state(name) for name in "ab"] == ["ok", "unloaded"]

    text = f'ttl = 60\n[models."{folder}/a"]\nttl = 0\n'
    play(folder, Loader(device_bytes=4 * GB), script, text)


def test_keep_alive(folder):
    async def script(server):
        await server.ask("b", keep_alive_s=0.0)
        await asyncio.sleep(1)
        assert server.state("b") == "unloaded"
        await server.ask("b", keep_alive_s=math.inf)
        await asyncio.sleep(10**6)
        assert server.state("b") == "ok"
        # The last to come says, and none under which it is unloaded.
        long = asyncio.create_task(server.ask("b", for_s=10.0, keep_alive_s=50.0))
        await server.ask("b", keep_alive_s=0.0)
        assert server.state("b") == "ok"
        await long
        await asyncio.sleep(40)
        assert server.state("b") == "ok"
        await asyncio.sleep(20)
        assert server.state("b") == "unloaded"

    play(folder, Loader(), script)


def test_unload_waits_for_those_who_use_it_and_holds_others_back(folder):
    async def script(server):
        await server.ask("b")
        long = asyncio.create_task(server.ask("b", for_s=10.0))
        await asyncio.sleep(0)
        unload = asyncio.create_task(server.manager.unload("b"))
        await asyncio.sleep(1)
        assert server.state("b") == "unloading"
        late = asyncio.create_task(server.ask("b"))
        await asyncio.sleep(1)
        assert not unload.done()
        await long
        assert (await unload).name == "b"
        await late
        assert server.loader.loads_of("b") == 2
        # So has everybody who asks for that.
        await server.ask("b")
        await asyncio.gather(server.manager.unload("b"), server.manager.unload("b"))
        # What is not loaded is unloaded already, and who does not wait for it does not have it unloaded.
        await server.manager.unload("c")
        long = asyncio.create_task(server.ask("b", for_s=10.0))
        await asyncio.sleep(0.01)
        unload = asyncio.create_task(server.manager.unload("b"))
        await asyncio.sleep(0.01)
        unload.cancel()
        await asyncio.sleep(0.01)
        await server.ask("b")
        await long
        assert server.state("b") == "ok"

    play(folder, Loader(), script)


def test_load_and_preload(folder):
    async def script(server):
        await asyncio.sleep(5)
        assert [server.state(name) for name in "ab"] == ["ok", "ok"]
        assert (await server.manager.load("c", 3.0)).name == "c"
        await asyncio.sleep(1)
        assert server.state("c") == "ok"
        await asyncio.sleep(3)
        assert server.state("c") == "unloaded"

    text = f'[models."{folder}/b"]\npreload = true\n'
    play(folder, Loader(device_bytes=4 * GB), script, text)


def test_names(folder):
    async def script(server):
        with pytest.raises(ModelNotFound) as unknown:
            await server.ask("e")
        assert "served: `a`" in unknown.value.hint
        with pytest.raises(ModelNotFound, match="`org/model` is not served") as unknown:
            await server.ask("org/model")
        assert "`metal pull org/model` fetches it" in unknown.value.hint
        async with server.manager.acquire_a(Engine, "short") as engine:
            assert engine.name == "b"
        async with server.manager.acquire_a(Engine, str(folder / "a")) as engine:
            assert engine.name == "a"
        # The second is not even loaded for that.
        for name in "ac":
            with pytest.raises(InvalidRequest, match=f"the model `{name}` counts") as unfit:
                async with server.manager.acquire(name):
                    pass
            assert unfit.value.param == "model"
        assert [listed.local.name for listed, _ in await server.manager.roster.listed()] == [
            "a",
            "b",
            "c",
            "d",
        ]
        return server.loader

    text = f'[models.aliases]\nshort = "{folder / "b"}"\n'
    assert len(play(folder, Loader(), script, text).loads) == 2


def test_models_come_to_the_disk_and_leave_it(folder, tmp_path):
    async def script(server):
        with pytest.raises(ModelNotFound):
            await server.ask("new")
        await asyncio.sleep(0.001)
        shutil.copytree(folder / "b", tmp_path / "new")
        assert (await server.manager.load(str(tmp_path / "new"), None)).name == "new"
        shutil.rmtree(tmp_path / "new")
        await asyncio.sleep(5)
        # Loaded, it serves all the same, and is told of.
        await server.ask("new")
        told = [(file, model.name) for file, model in await server.manager.roster.listed() if model]
        assert (None, "new") in told
        await server.manager.unload("new")
        with pytest.raises(ModelNotFound):
            await server.ask("new")
        assert "new" not in {model.name for _, model in await server.manager.roster.listed() if model}

    play(folder, Loader(device_bytes=4 * GB), script, models_dir=tmp_path)


def test_how_long_requests_may_be_is_told_before_a_model_is_loaded(folder):
    async def script(server):
        files = {file.local.name: file for file, _ in await server.manager.roster.listed()}
        return {name: file.max_model_len for name, file in files.items()}

    text = f'[models."{folder}/b"]\nmax_model_len = 64\n'
    assert play(folder, Loader(), script, text) == {"a": 4096, "b": 64, "c": 4096, "d": 4096}


def test_a_name_is_not_looked_for_among_paths(folder, monkeypatch):
    def exists(path: Path) -> bool:
        assert "secret" not in str(path)
        return True

    async def script(server):
        monkeypatch.setattr(Path, "exists", exists)
        for name in ("/secret/model", "secret/model", "~secret/model", "../secret", "x" * 10**6):
            with pytest.raises(ModelNotFound):
                await server.ask(name)

    play(folder, Loader(), script)


def test_one_model_by_many_names_is_loaded_once(folder):
    async def script(server):
        assert [model.name for model in server.manager.roster.models] == ["a", "b"]
        await asyncio.sleep(5)
        for name in ("b", "first", "second", str(folder / "b")):
            async with server.manager.acquire_a(Engine, name) as engine:
                assert engine.name == "b"
        return server.loader

    text = f"""
        [models.aliases]
        first = "{folder}/b"
        second = "{folder}/../{folder.name}/b"
        other = "{folder}/a"
        [models."first"]
        preload = true
        [models."second"]
        preload = true
        [models."other"]
        preload = true
    """
    assert [name for _, name in play(folder, Loader(), script, text).loads] == ["a", "b"]


def test_models_are_preloaded_by_any_name_and_those_that_cannot_be_are_told(folder, caplog):
    async def script(server):
        await asyncio.sleep(5)
        assert server.loader.resident == {"a", "b"}

    play(folder, Loader(), script, '[models."bb"]\npreload = true\n[models."b"]\npreload = true\n')
    assert "`bb` is not preloaded: the model `bb` is not served here; did you mean `b`?" in caplog.text


def test_what_did_not_fit_beside_a_pinned_model_does_when_that_has_left(folder):
    async def script(server):
        await server.ask("a")
        for _ in range(3):
            with pytest.raises(InsufficientMemory, match="of which pinned models hold"):
                await server.ask("b")
        await server.manager.unload("a")
        await server.ask("b")

    play(folder, Loader(b=2 * GB), script, "pinned = true\n")


def test_what_waits_no_more_is_measured_anew(folder):
    async def script(server):
        busy = [asyncio.create_task(server.ask(name, for_s=100.0)) for name in "ac"]
        await asyncio.sleep(5)
        with pytest.raises(DeadlineExceeded):
            await server.ask("b", deadline_s=5.0)
        server.loader.sizes["b"] = 3 * GB
        with pytest.raises(InsufficientMemory):
            await server.ask("b")
        await asyncio.gather(*busy)

    play(folder, Loader(), script)


def test_a_model_that_turns_out_to_need_more_has_others_give_way(folder):
    class Underrated(Loader):
        def took(self, engine: Engine) -> None:
            super().took(engine)
            left = self.device_bytes - sum(each.need.weight_bytes for each in self.engines)
            if engine.name == "b" and left < step_bytes:
                self.freed(engine)
                raise TooTight("no memory is left", ModelNeed(weight_bytes=GB, step_bytes=step_bytes))

    async def script(server):
        await server.ask("a")
        await server.ask("b")
        assert server.loader.resident == {"b"}
        assert server.loader.loads_of("b") == 2

    async def hopeless(server):
        await server.ask("a")
        for _ in range(3):
            with pytest.raises(InsufficientMemory, match="`b` needs 3.00 GB .* allows 2.00 GB") as told:
                await server.ask("b")
            await asyncio.sleep(600)
        assert "no value would do" in told.value.hint
        assert server.loader.loads_of("b") == 1
        # It was known before others had to go.
        assert server.loader.resident == {"a"}

    step_bytes = GB // 2
    play(folder, Underrated(), script)
    step_bytes = 2 * GB
    play(folder, Underrated(), hopeless)


def test_an_engine_that_fails_ends_the_server_and_tells_who_waits(folder):
    async def script(server):
        await server.ask("a")
        [engine] = server.loader.engines
        waiting = asyncio.create_task(server.ask("b"))
        await asyncio.sleep(0.1)
        engine.failure = "the device is gone"
        engine.failed.set()
        with pytest.raises(EngineUnavailable, match="the device is gone"):
            await waiting
        assert (await server.manager.fatal).exit_code == 3
        assert server.manager.health().status == "failed"
        with pytest.raises(EngineUnavailable, match="the device is gone"):
            await server.ask("a")

    play(folder, Loader(), script)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_default_model_that_cannot_be_had(folder, persistent):
    async def script(server):
        server.loader.errors["a"] = NotAModel("`a` is broken")
        await server.manager.settled()
        assert server.manager.fatal.done() != persistent
        assert server.manager.readiness().status == "failed"
        assert (server.manager.health().status == "ok") == persistent
        if persistent:
            await server.ask("b")

    play(folder, Loader(), script, persistent=persistent)


def test_a_drain_refuses_who_waits_and_lets_others_end(folder):
    async def script(server):
        await server.ask("a")
        running = asyncio.create_task(server.ask("a", for_s=5.0))
        waiting = asyncio.create_task(server.ask("b"))
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        await server.manager.drain(30.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(4.9)
        await running
        for refused in (waiting, server.ask("a")):
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await refused

    play(folder, Loader(), script)


def test_who_waits_for_an_unloading_is_answered_before_the_server_ends(folder):
    answers = []

    async def unload(server):
        answers.append((await server.manager.unload("a")).name)

    async def script(server):
        await server.ask("a")
        tasks = [asyncio.create_task(server.ask("a", for_s=1000.0)), asyncio.create_task(unload(server))]
        await asyncio.sleep(0.1)
        await server.manager.drain(1.0)
        assert not answers
        return tasks

    play(folder, Loader(), script)
    assert answers == ["a"]


def test_kv_budgets_follow_what_else_is_loaded(folder):
    async def script(server):
        await server.ask("a")
        [engine] = server.loader.engines
        whole = engine.kv_budget
        await server.ask("b")
        assert {each.kv_budget for each in server.loader.engines} == {(whole - GB) // 2}
        await server.manager.unload("b")
        assert engine.kv_budget == whole == 3 * GB

    class WithKV(Loader):
        def _need(self, name: str) -> ModelNeed:
            return ModelNeed(weight_bytes=GB, least_kv_bytes=1, useful_kv_bytes=1, full_kv_bytes=1000)

    play(folder, WithKV(device_bytes=4 * GB), script)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "name": draw(st.sampled_from("abcd")),
        "at_s": draw(st.floats(0, 60)),
        "for_s": draw(st.sampled_from([0.0, 0.1, 1.0, 10.0])),
        "keep_alive_s": draw(st.sampled_from([None, 0.0, 1.0, math.inf])),
        "leaves_after_s": draw(st.sampled_from([None, None, 0.0, 0.5, 3.0])),
    }


@settings(max_examples=150)
@given(
    asked=st.lists(requests(), max_size=40),
    unloads=st.lists(st.tuples(st.floats(0, 60), st.sampled_from("abcd")), max_size=5),
    sizes=st.fixed_dictionaries({name: st.sampled_from([GB // 2, GB, 2 * GB]) for name in "abcd"}),
    device_bytes=st.sampled_from([2 * GB, 3 * GB, 4 * GB]),
    is_pinned=st.booleans(),
)
def test_whatever_is_asked(folder, asked, unloads, sizes, device_bytes, is_pinned):
    """Nobody is unloaded under a request, memory is never over its budget, everybody who stays is served."""

    async def ask(server, request: dict[str, Any]) -> None:
        leaves_after_s = request.pop("leaves_after_s")
        at_s = request["at_s"]
        asking = asyncio.create_task(server.ask(**request))
        if leaves_after_s is not None:
            await asyncio.sleep(at_s + leaves_after_s)
            asking.cancel()
        try:
            await asking
        except asyncio.CancelledError:
            assert leaves_after_s is not None
        except InsufficientMemory:
            assert is_pinned
            assert sizes["a"] + sizes[request["name"]] > device_bytes

    async def unload(server, at_s: float, name: str) -> None:
        await asyncio.sleep(at_s)
        await server.manager.unload(name)

    async def script(server):
        work: Iterable[Any] = [ask(server, dict(request)) for request in asked]
        await asyncio.gather(*work, *(unload(server, *each) for each in unloads))
        assert all(model.num_users == 0 for model in server.manager.roster.models)
        await asyncio.sleep(LOAD_S)
        return server.loader

    loader = Loader(device_bytes=device_bytes, **sizes)
    play(folder, loader, script, f"pinned = {str(is_pinned).lower()}\n")
    assert len(loader.loads) <= len(asked) + 1
