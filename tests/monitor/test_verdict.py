from __future__ import annotations

from pathlib import Path

import pytest

from vllm_metal.monitor import ioreg, macmon
from vllm_metal.monitor.powermetrics import readings
from vllm_metal.monitor.reading import GpuReading, StateShare
from vllm_metal.monitor.verdict import Verdict, format_power, judge

DATA = Path(__file__).parent / "data"
NOT_PYTORCH = "this is MLX, not PyTorch MPS: the tools of `torch.mps` say nothing about it"


def of(name: str) -> Verdict:
    *_, reading = readings([(DATA / name).read_bytes()])
    return judge(reading)


def test_a_loaded_gpu_that_power_holds_back() -> None:
    assert of("loaded.txt") == Verdict(
        "loaded",
        "fully loaded: 100% active, 754 of 1578 MHz, 21.2 W",
        (
            "the firmware asked for P8 and power and thermal limits settled it at P2–P3: normal dynamic "
            "scaling, not a fault",
            "the states' weighted mean of 753 MHz agrees with the headline",
            "it ran at 48% of its fastest state, 1578 MHz",
            "how many watts a loaded GPU draws depends on the chip: a base one is saturated at 8 to 10 W",
            NOT_PYTORCH,
        ),
    )


def test_a_table_that_is_cut_short_tells_no_fastest_state() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    [reading] = readings([page.encode()])
    verdict = judge(reading)
    # P8 was asked for, so there are more than the two states that are listed.
    assert verdict.summary == "fully loaded: 100% active, 754 MHz, 21.2 W"
    assert verdict.details[:2] == of("loaded.txt").details[:2]
    assert not any("fastest" in detail for detail in verdict.details)


@pytest.mark.parametrize(
    ("name", "kind", "summary"),
    [
        ("t2.txt", "idle", "idle: 2% active, 338 of 1578 MHz, 33 mW"),
        ("t6.txt", "idle", "idle: 0% active, 338 of 1338 MHz, 0 mW"),
        ("t7.txt", "loaded", "fully loaded: 100% active, 1380 of 1380 MHz, 9.1 W"),
        ("t8.txt", "loaded", "fully loaded: 100% active, 1398 of 1398 MHz, 8.1 W"),
        ("p3.plist", "loaded", "fully loaded: 94% active, 1361 of 1398 MHz, 70.0 W"),
        ("p4.plist", "busy", "working, with room left: 15% active, 371 MHz, 0.2 W"),
    ],
)
def test_every_kind_of_reading(name: str, kind: str, summary: str) -> None:
    verdict = of(name)
    assert (verdict.kind, verdict.summary) == (kind, summary)
    assert verdict.details[-1] == NOT_PYTORCH


def test_watts_are_told_but_not_judged() -> None:
    base = GpuReading(source="powermetrics", active_ratio=1.0, power_mw=8300)
    assert judge(base).kind == "loaded"
    assert any("depends on the chip" in detail for detail in judge(base).details)


def test_full_residency_at_no_power_is_suspicious() -> None:
    verdict = judge(GpuReading(source="powermetrics", active_ratio=0.99, power_mw=40))
    assert verdict.kind == "suspicious"
    assert verdict.summary == "suspicious: 99% active at only 40 mW"
    assert "under concurrent load" in verdict.details[0]


def test_idle_is_normal_unless_requests_run() -> None:
    reading = GpuReading(source="powermetrics", active_ratio=0.03)
    assert "normal" in judge(reading).details[0]
    assert judge(reading, num_running=0) == judge(reading)
    one = judge(reading, num_running=1)
    assert one.summary == "idle, though 1 request runs: 3% active"
    assert "a burst that a sample of 1 s misses" in one.details[0]
    assert judge(reading, num_running=3).summary == "idle, though 3 requests run: 3% active"


def test_a_mean_that_disagrees_is_told() -> None:
    text = (DATA / "loaded.txt").read_text().replace("frequency: 754 MHz", "frequency: 1400 MHz")
    [reading] = readings([text.encode()])
    assert any("does not agree with the headline of 1400 MHz" in detail for detail in judge(reading).details)


def test_what_was_asked_for_and_given_is_no_limit() -> None:
    reading = GpuReading(
        source="powermetrics",
        active_ratio=1.0,
        requested=(StateShare("P7", 0.005), StateShare("P12", 0.995)),
        granted=(StateShare("SW_P12", 1.0), StateShare("SW_PX", 1.0)),
    )
    assert judge(reading).details[0] == "the firmware asked for P12 and got P12"


def test_heat_is_told() -> None:
    hot = GpuReading(source="powermetrics", active_ratio=1.0, thermal_pressure="Heavy")
    assert any("`Heavy` thermal pressure" in detail for detail in judge(hot).details)


def test_without_a_residency_utilisation_stands_in() -> None:
    driver = ioreg.parse((DATA / "ioreg_m1_max_loaded.txt").read_text())
    older = macmon.parse((DATA / "macmon_old.json").read_text())
    assert driver is not None
    assert older is not None
    assert judge(driver).summary == "fully loaded: 95% utilised"
    assert judge(older).summary == "nothing tells how busy the GPU is"
    both = older.filled_from(driver)
    assert both.source == "macmon + ioreg"
    assert judge(both).kind == "suspicious"
    assert both.filled_from(driver) is both
    assert judge(None).summary == "no program here tells of a GPU of Apple's"


@pytest.mark.parametrize(("mw", "text"), [(0, "0 mW"), (99.4, "99 mW"), (100, "0.1 W"), (21200, "21.2 W")])
def test_power_is_readable(mw: float, text: str) -> None:
    assert format_power(mw) == text
