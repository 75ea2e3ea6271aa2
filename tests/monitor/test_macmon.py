from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.monitor import macmon
from vllm_metal.monitor.reading import GpuReading

DATA = Path(__file__).parent / "data"


def test_the_recorded_shape() -> None:
    assert macmon.parse((DATA / "macmon.json").read_text()) == GpuReading(
        source="macmon",
        active_ratio=0.985,
        active_frequency_mhz=1296,
        power_mw=8500,
        combined_power_mw=9375,
        temperature_celsius=51.5,
    )


def test_an_older_one_tells_no_residency() -> None:
    assert macmon.parse((DATA / "macmon_old.json").read_text()) == GpuReading(
        source="macmon",
        active_frequency_mhz=461,
        power_mw=17.5,
        combined_power_mw=267.5,
        temperature_celsius=50.25,
    )


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "null", "{}", "[" * 100_000, '{"gpu_usage": [], "temp": 3, "gpu_power": "much"}']
)
def test_what_is_no_sample_gives_none(line: str) -> None:
    assert macmon.parse(line) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=2),
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["gpu_usage", "gpu_freq_mhz", "gpu_active_ratio", "gpu_power", "all_power", "temp"]),
        json_values,
    )
)
def test_values_of_any_kind_are_survived(sample: dict[str, object]) -> None:
    reading = macmon.parse(json.dumps(sample))
    if reading is not None and reading.active_ratio is not None:
        assert 0 <= reading.active_ratio <= 1
