"""What a server knows, for tests of how it tells that."""

from __future__ import annotations

from vllm_metal.engine.histogram import Histogram
from vllm_metal.engine.measurements import BOUNDS
from vllm_metal.engine.mlx.memory import MemoryUse
from vllm_metal.engine.model_summary import ModelSummary
from vllm_metal.engine.outputs import EngineStats, FinishReason
from vllm_metal.monitor.exposition import ModelFigures, ServerFigures
from vllm_metal.monitor.host import Host
from vllm_metal.monitor.machine import Machine
from vllm_metal.monitor.reading import GpuReading


def everything(name: str = "org/model") -> ServerFigures:
    """All that a server can tell, on a Mac with `macmon`."""
    first_token = Histogram(BOUNDS["time_to_first_token_seconds"])
    for value in (0.0005, 0.3, 0.3, 9999.0):
        first_token.observe(value)
    model = ModelFigures(
        model_name=name,
        num_running=3,
        num_waiting=2,
        stats=EngineStats(
            kv_used_bytes=250,
            kv_budget_bytes=1000,
            prompt_tokens=70,
            generation_tokens=30,
            busy_s=1.5,
            finished={FinishReason.STOP: 4},
            distributions={"time_to_first_token_seconds": first_token.distribution()},
        ),
        model=ModelSummary(number_format="4-bit", device="GPU", mode="fused", weight_bytes=500, load_s=2.5),
        max_model_len=4096,
    )
    machine = Machine(
        host=Host(memory_bytes=16, memory_available_bytes=8, memory_wired_bytes=4, pressure="critical"),
        gpu=GpuReading(source="macmon", active_ratio=0.75, power_mw=21200.0),
        memory=MemoryUse(active_bytes=600, cache_bytes=50, peak_bytes=700),
    )
    return ServerFigures([model], machine)
