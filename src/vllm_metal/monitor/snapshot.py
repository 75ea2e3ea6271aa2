"""One look at everything: the GPU, the machine and the daemon."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.client import Client
from vllm_metal.errors import MetalError
from vllm_metal.monitor import engine_figures, host, ioreg, macmon, sudo
from vllm_metal.monitor.engine_figures import EngineFigures, Scrape
from vllm_metal.monitor.host import Host
from vllm_metal.monitor.reading import GpuReading
from vllm_metal.monitor.verdict import Verdict, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`host` and `engine` are None for a recording; `engine_problem` tells why there are no figures.

    `models` are the server's, each as its status tells.
    """

    verdict: Verdict
    gpu: GpuReading | None
    host: Host | None = None
    engine_url: str | None = None
    engine: EngineFigures | None = None
    engine_problem: str | None = None
    models: Sequence[Mapping[str, Any]] = ()


class Watch:
    """Takes snapshots whose rates are of the time since the one before."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: Scrape | None = None
        self._look()

    def take(self, interval_s: float, *, with_power: bool = False) -> Snapshot:
        """Watch for `interval_s`. Raises MetalError where power is wanted and refused."""
        return self.take_with(read_gpu(interval_s, with_power=with_power))

    def take_with(self, gpu: GpuReading | None) -> Snapshot:
        """A snapshot around a reading that was taken just now."""
        engine, problem = self._look()
        return Snapshot(
            verdict=judge(gpu, num_running=engine.num_running if engine else None),
            gpu=gpu,
            host=host.read(),
            engine_url=self._client.url,
            engine=engine,
            engine_problem=problem,
            models=self._models() if engine else (),
        )

    def _models(self) -> Sequence[Mapping[str, Any]]:
        try:
            models: Sequence[Mapping[str, Any]] = self._client.status()["models"]
        except MetalError:
            return ()
        return models

    def _look(self) -> tuple[EngineFigures | None, str | None]:
        before, self._before = self._before, None
        try:
            self._before = engine_figures.parse(self._client.metrics(), time.monotonic())
        except MetalError as exc:
            return None, exc.message
        except ValueError:
            return None, "its figures are in another format"
        return engine_figures.figures(self._before, before), None


def read_gpu(interval_s: float, *, with_power: bool) -> GpuReading | None:
    """What the best of the programs that are here and allowed tells of the next `interval_s`."""
    reading = None
    if with_power:
        reading = sudo.read(interval_s)
    elif macmon.is_installed():
        reading = macmon.read(interval_s)
    if reading is None:
        time.sleep(interval_s)
    driver = ioreg.read()
    return reading.filled_from(driver) if reading and driver else reading or driver
