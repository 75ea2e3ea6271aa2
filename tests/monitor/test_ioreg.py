from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.monitor import ioreg
from vllm_metal.monitor.reading import GpuReading

DATA = Path(__file__).parent / "data"
LOADED = (DATA / "ioreg_m1_max_loaded.txt").read_text()


@pytest.mark.parametrize(
    ("name", "chip", "core_count", "utilization_ratio", "in_use_bytes", "allocated_bytes"),
    [
        ("m1_max", "Apple M1 Max", 32, 0.24, 744570000, 23601100000),
        ("m1_max_loaded", "Apple M1 Max", 32, 0.95, 2540380000, 4420200000),
        ("m3", "Apple M3", 10, 0.28, 1220110000, 5190700000),
        ("m3_pro", "Apple M3 Pro", 18, 0.15, 568100000, 16740050000),
        ("m4_idle", "Apple M4", 10, 0.0, 763700000, 2620630000),
        ("m5_pro", "Apple M5 Pro", 16, 0.34, 1210200000, 4080430000),
    ],
)
def test_every_recorded_shape(
    name: str, chip: str, core_count: int, utilization_ratio: float, in_use_bytes: int, allocated_bytes: int
) -> None:
    assert ioreg.parse((DATA / f"ioreg_{name}.txt").read_text()) == GpuReading(
        source="ioreg",
        chip=chip,
        core_count=core_count,
        utilization_ratio=utilization_ratio,
        memory_in_use_bytes=in_use_bytes,
        memory_allocated_bytes=allocated_bytes,
    )


def test_output_that_ends_anywhere_tells_the_truth_or_nothing() -> None:
    whole = ioreg.parse(LOADED)
    for end in range(len(LOADED)):
        if (reading := ioreg.parse(LOADED[:end])) is not None:
            for field in ("chip", "core_count", "utilization_ratio", "memory_in_use_bytes"):
                assert getattr(reading, field) in (getattr(whole, field), None), end


def test_a_driver_without_statistics_is_passed_over() -> None:
    other = '+-o AppleParavirtGPU  <class AppleParavirtGPU>\n    {\n      "model" = "Other"\n    }\n\n'
    assert ioreg.parse(other) is None
    assert ioreg.parse(other + LOADED) == ioreg.parse(LOADED)


def test_odd_values_are_left_out() -> None:
    text = LOADED.replace('Device Utilization %"=95', 'Device Utilization %"=950').replace(
        "= 32\n", "= many\n"
    )
    reading = ioreg.parse(text.replace('"Apple M1 Max"', '"\x1b[2J"'))
    assert reading is not None
    assert (reading.utilization_ratio, reading.core_count, reading.chip) == (None, None, None)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    assert ioreg.parse(text) is None
