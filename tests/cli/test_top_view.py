"""What `metal top` draws, to the letter, on terminals of a fixed size."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from vllm_metal.cli.top_view import render
from vllm_metal.monitor import ioreg
from vllm_metal.monitor.engine_figures import EngineFigures
from vllm_metal.monitor.host import Host
from vllm_metal.monitor.powermetrics import readings
from vllm_metal.monitor.reading import FrequencyShare
from vllm_metal.monitor.snapshot import Snapshot
from vllm_metal.monitor.verdict import judge

DATA = Path(__file__).parent.parent / "monitor" / "data"
SCREEN = """\
Apple M1 Max · 32 GPU cores · macOS 26.1 · read by powermetrics + ioreg
fully loaded: 100% active, 754 of 1578 MHz, 21.2 W
GPU
active       ████████████████████████████████████████ 100%
frequency    754 MHz, at most 1578
   618 MHz   ██████████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  24%
   796 MHz   ██████████████████████████████░░░░░░░░░░  76%
power        21.2 W
asked for    P8 100%
granted      SW_P2 24%  SW_P3 76%
Memory
model        weights 4.2 GB, KV 1.5 GB, cache 300.0 MB
GPU          2.5 GB in use, 4.4 GB allocated
system       9.0 GB of 34.4 GB available, wired 7.1 GB, swap 0 B
pressure     normal
Engine at http://127.0.0.1:8000
models       org/model 4.2 GB · org/other loading
requests     8 running, 3 waiting
speed        prefill 1,234 tok/s, decode 567 tok/s
step         14.2 ms, prefix hits 75%
KV use       ██████████████████░░░░░░░░░░░░░░░░░░░░░░  44%
busy         ███████████████████████████████████████░  97%
"""


@pytest.fixture
def snapshot() -> Snapshot:
    [reading] = readings([(DATA / "loaded.txt").read_bytes()])
    driver = ioreg.parse((DATA / "ioreg_m1_max_loaded.txt").read_text())
    assert driver is not None
    return Snapshot(
        verdict=judge(reading),
        gpu=reading.filled_from(driver),
        host=Host(
            chip="Apple M1 Max",
            macos_version=(26, 1),
            memory_bytes=34_359_738_368,
            memory_available_bytes=9_000_000_000,
            memory_wired_bytes=7_100_000_000,
            swap_used_bytes=0,
            pressure="normal",
        ),
        engine_url="http://127.0.0.1:8000",
        engine=EngineFigures(
            num_running=8,
            num_waiting=3,
            prefill_tokens_per_s=1234.4,
            decode_tokens_per_s=566.7,
            kv_usage_ratio=0.4375,
            prefix_hit_ratio=0.75,
            step_time_s=0.01421,
            busy_ratio=0.97,
            weights_bytes=4_200_000_000,
            kv_bytes=1_500_000_000,
            cache_bytes=300_000_000,
        ),
        models=[
            {"name": "org/model", "status": "ok", "size_bytes": 4_200_000_000},
            {"name": "org/other", "status": "loading", "size_bytes": None},
            {"name": "org/third", "status": "unloaded", "size_bytes": None},
        ],
    )


def drawn(snapshot: Snapshot, width: int, *, with_details: bool = False) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(snapshot, width, with_details=with_details))
    return capture.get()


def test_a_loaded_gpu_on_80_columns(snapshot: Snapshot) -> None:
    assert drawn(snapshot, 80) == SCREEN
    # It fits a terminal of 24 lines, the cursor's included.
    assert len(SCREEN.splitlines()) < 24


@pytest.mark.parametrize("width", [2, 8, 20, 40, 79])
def test_a_narrow_terminal_cuts_lines_and_adds_none(snapshot: Snapshot, width: int) -> None:
    lines = drawn(snapshot, width).splitlines()
    assert all(len(line) <= width for line in lines)
    # All but the verdict, which is wrapped.
    num_rows = len(SCREEN.splitlines()) - 2
    assert lines[-num_rows].startswith("G")
    if width >= 20:
        assert lines[-1].endswith(" 97%")
    if width >= 40:
        assert "asked for    P8 100%" in lines


def test_details_explain_the_verdict(snapshot: Snapshot) -> None:
    text = drawn(snapshot, 200, with_details=True)
    assert "\n  the firmware asked for P8 and power and thermal limits settled it at P2–P3" in text


def test_a_full_table_of_states_shows_those_that_count() -> None:
    shares = " ".join(f"{400 + n} MHz: {n}%" for n in range(1, 13))
    sample = (
        f"GPU HW active frequency: 408 MHz\nGPU HW active residency: 78.00% ({shares})\nGPU Power: 9 mW\n"
    )
    [reading] = readings([sample.encode()])
    snapshot = Snapshot(verdict=judge(reading), gpu=reading)

    def frequencies(text: str) -> list[str]:
        return [line.split()[0] for line in text.splitlines() if " MHz   " in line]

    text = drawn(snapshot, 80)
    assert frequencies(text) == ["410", "411", "412"]
    assert frequencies(drawn(snapshot, 80, with_details=True)) == [str(n) for n in range(401, 413)]
    assert "Memory" not in text
    assert "Engine" not in text


def test_all_that_a_mac_can_tell_fits_24_lines(snapshot: Snapshot) -> None:
    # Shares that are alike are no reason for more lines.
    frequencies = tuple(FrequencyShare(600 + n, 0.125) for n in range(8))
    assert snapshot.gpu is not None
    gpu = dataclasses.replace(snapshot.gpu, frequencies=frequencies, thermal_pressure="Heavy")
    lines = drawn(dataclasses.replace(snapshot, gpu=gpu), 80).splitlines()
    assert len(lines) <= 24
    assert lines[-1].startswith("busy ")
