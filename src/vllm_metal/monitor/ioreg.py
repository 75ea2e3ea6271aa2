"""The GPU's driver in `ioreg`: utilisation, memory and number of cores, for everybody to read."""

from __future__ import annotations

import re

from vllm_metal.monitor import command, quantity
from vllm_metal.monitor.reading import GpuReading

SOURCE = "ioreg"

_ARGUMENTS = ("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
_PROPERTY = re.compile(r'^[ |]*"([^"\n]+)" = (.+)\n', re.MULTILINE)
# A number counts only when what follows it is there: a cut-off one is another number.
_STATISTIC = re.compile(r'"([^"]+)"=(\d{1,18})(?=[,}])')


def read() -> GpuReading | None:
    """None where there is no such driver, as on every system but macOS."""
    return parse(command.run(*_ARGUMENTS).stdout)


def parse(text: str) -> GpuReading | None:
    """The first accelerator of `ioreg -r -d 1 -w 0 -c IOAccelerator` that has statistics."""
    for driver in re.split(r"^\+-o ", text, flags=re.MULTILINE):
        properties = dict(_PROPERTY.findall(driver))
        statistics = {
            key: int(value) for key, value in _STATISTIC.findall(properties.get("PerformanceStatistics", ""))
        }
        if statistics:
            return GpuReading(
                source=SOURCE,
                chip=_text(properties.get("model", "")),
                core_count=_whole(properties.get("gpu-core-count", "")),
                utilization_ratio=_percent(statistics.get("Device Utilization %")),
                memory_in_use_bytes=statistics.get("In use system memory"),
                memory_allocated_bytes=statistics.get("Alloc system memory"),
            )
    return None


def _percent(value: int | None) -> float | None:
    return None if value is None else quantity.ratio(value / 100)


def _text(value: str) -> str | None:
    quoted = re.fullmatch(r'"([ -!#-~]{1,60})"', value)
    return quoted[1] if quoted else None


def _whole(value: str) -> int | None:
    return int(value) if re.fullmatch(r"[0-9]{1,6}", value) else None
