"""`macmon`, where it is installed: residency, frequency and power of the GPU without sudo."""

from __future__ import annotations

import json
import shutil

from vllm_metal.monitor import command, quantity
from vllm_metal.monitor.reading import GpuReading

SOURCE = "macmon"


def is_installed() -> bool:
    return shutil.which(SOURCE) is not None


def read(interval_s: float) -> GpuReading | None:
    """Watch for `interval_s`; None where that fails."""
    interval_ms = str(round(interval_s * 1000))
    done = command.run(SOURCE, "pipe", "-s", "1", "-i", interval_ms, timeout_s=interval_s + command.TIMEOUT_S)
    return parse(done.stdout)


def parse(line: str) -> GpuReading | None:
    """One line of `macmon pipe`. Its powers are in watts.

    Its older field `gpu_usage` holds a frequency and a usage that is scaled by it, which is no residency.
    """
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sample, dict):
        return None
    usage = sample.get("gpu_usage")
    temperatures = sample.get("temp")
    frequency = sample.get("gpu_freq_mhz", usage[0] if isinstance(usage, list) and usage else None)
    reading = GpuReading(
        source=SOURCE,
        active_ratio=quantity.ratio(sample.get("gpu_active_ratio")),
        active_frequency_mhz=quantity.bare_frequency_mhz(frequency),
        power_mw=_milliwatts(sample.get("gpu_power")),
        combined_power_mw=_milliwatts(sample.get("all_power")),
        temperature_celsius=quantity.number(temperatures.get("gpu_temp_avg"))
        if isinstance(temperatures, dict)
        else None,
    )
    return None if reading == GpuReading(source=SOURCE) else reading


def _milliwatts(watts: object) -> float | None:
    amount = quantity.number(watts)
    return None if amount is None else amount * 1000
