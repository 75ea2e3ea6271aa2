from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.monitor.powermetrics import readings
from vllm_metal.monitor.reading import FrequencyShare, GpuReading, StateShare

DATA = Path(__file__).parent / "data"
SAMPLES = [*DATA.glob("*.plist"), DATA / "loaded.txt", *DATA.glob("t?.txt")]
FIELDS = ("machine", "active_frequency_mhz", "active_ratio", "power_mw", "combined_power_mw")


def read(name: str) -> list[GpuReading]:
    return list(readings([(DATA / name).read_bytes()]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loaded.txt", [("Mac16,5", 754, 1.0, 21200, None)]),
        ("t1.txt", [(None, 396, 0.0627, 17, None)]),
        ("t2.txt", [("Mac16,6", 338, 0.0184, 33, 902)]),
        ("t3.txt", [("Mac16,13", 338, 0.0132, 7, None)]),
        ("t4.txt", [("Mac15,10", 338, 0.0472, 26, None)]),
        ("t5.txt", [(None, 338, 0.0291, 6, None)]),
        ("t6.txt", [("Mac15,3", 338, 0.0021, 0, 141)]),
        ("t7.txt", [("Mac15,14", 1380, 1.0, 9120, 17830)]),
        ("t8.txt", [("Mac14,6", 444, 0.1357, 52, None), ("Mac14,6", 1398, 0.998, 8117, None)]),
        (
            "p1_p2.plist",
            [
                ("MacBookPro17,1", 712.204, 0.02, 16.3366, 61.8812),
                ("MacBookPro17,1", 714.112, 0.062, 20.9924, 118.321),
            ],
        ),
        ("p3.plist", [("Mac14,14", 1361.25, 0.94, 70000, 70845.7)]),
        # No processor was sampled: 202 mJ in 1.01 s.
        ("p4.plist", [("Mac17,9", 371.416, 0.15, 200, None)]),
    ],
)
def test_every_recorded_shape(name: str, expected: list[tuple[object, ...]]) -> None:
    found = read(name)
    assert [tuple(getattr(reading, field) for field in FIELDS) for reading in found] == expected
    assert {reading.source for reading in found} == {"powermetrics"}


def test_states_of_the_text_format() -> None:
    [reading] = read("loaded.txt")
    assert len(reading.frequencies) == len(reading.requested) == len(reading.granted) == 15
    assert [share for share in reading.frequencies if share.ratio] == [
        FrequencyShare(618, 0.24),
        FrequencyShare(796, 0.76),
    ]
    # One frequency is there twice, and they are not sorted.
    assert [share.frequency_mhz for share in reading.frequencies][7:11] == [1182, 1182, 1312, 1242]
    assert [share for share in reading.requested if share.ratio] == [StateShare("P8", 1)]
    assert [share for share in reading.granted if share.ratio] == [
        StateShare("SW_P2", 0.24),
        StateShare("SW_P3", 0.76),
    ]
    assert reading.elapsed_s == pytest.approx(1.00411)


def test_states_of_the_oldest_labels() -> None:
    [reading] = read("t1.txt")
    assert reading.frequencies == reading.requested_frequencies
    assert reading.frequencies[0] == FrequencyShare(396, 0.063)
    assert reading.requested == reading.granted == ()


def test_states_of_property_lists() -> None:
    [first, second] = read("p1_p2.plist")
    assert first.frequencies[2] == FrequencyShare(720, 0.01976)
    assert second.requested_frequencies == (FrequencyShare(720, 0.062),)
    assert first.thermal_pressure == "Nominal"
    [ultra] = read("p3.plist")
    assert ultra.requested[7] == StateShare("P8", 1)
    # Under full load this machine names no state that it settled on.
    assert {share.ratio for share in ultra.granted} == {0}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_samples_are_the_same_however_the_stream_is_cut(path: Path, size: int) -> None:
    data = path.read_bytes()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(readings(pieces)) == list(readings([data]))


@pytest.mark.parametrize("name", ["t8.txt", "p1_p2.plist"])
def test_a_sample_is_given_before_the_next_one_begins(name: str) -> None:
    data = (DATA / name).read_bytes()
    end = data.index(b"52 mW\n") + 6 if name == "t8.txt" else data.index(b"</plist>") + 8

    def stream() -> object:
        yield data[:end]
        raise AssertionError("read on")

    assert next(readings(stream())).machine in ("Mac14,6", "MacBookPro17,1")


@pytest.mark.parametrize("name", ["loaded.txt", "t1.txt", "t4.txt", "p4.plist"])
def test_a_stream_that_ends_anywhere_tells_the_truth_or_nothing(name: str) -> None:
    data = (DATA / name).read_bytes()
    [whole] = readings([data])
    for end in range(len(data)):
        for reading in readings([data[:end]]):
            for field in (
                "machine",
                "active_ratio",
                "active_frequency_mhz",
                "power_mw",
                "frequencies",
                "granted",
            ):
                assert getattr(reading, field) in (getattr(whole, field), None, ()), (end, field)


def test_what_is_cut_off_at_the_front_is_no_obstacle() -> None:
    data = (DATA / "t8.txt").read_bytes()
    for start in range(0, len(data), 5):
        list(readings([data[start:]]))
    tail = data[data.index(b"GPU idle residency") :]
    assert [reading.active_ratio for reading in readings([tail])] == [0.1357, 0.998]


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("GPU Power: 21.5 W", "power_mw", 21500),
        ("GPU Power: 21500 furlongs", "power_mw", None),
        ("GPU Power: 21500", "power_mw", None),
        ("GPU Power: -3 mW", "power_mw", None),
        ("GPU Power: nan mW", "power_mw", None),
        ("GPU Power: 1e400 mW", "power_mw", None),
        ("GPU HW active frequency: 1.25 GHz", "active_frequency_mhz", 1250),
        ("GPU HW active frequency: 754", "active_frequency_mhz", None),
        ("GPU HW active residency: 97,20% (338 MHz: 97,2%)", "active_ratio", 0.5),
        ("GPU HW active residency: 250.00%", "active_ratio", 0.5),
        ("GPU HW active residency: 100.01%", "active_ratio", 1),
        ("GPU HW active residency:  40.00% (338 MHz:  40% 618 MHz", "active_ratio", 0.4),
        ("GPU HW active residency:  40.00% (338 MHz:  40% 618 MHz", "frequencies", ()),
        ("GPU HW active residency:  40.00% (338 MHz:  40% turbo: 1%)", "frequencies", ()),
        ("GPU-Leistung: 21500 mW", "power_mw", None),
        ("Current pressure level: \x1b[2J", "thermal_pressure", None),
        ("Current pressure level: Heavy", "thermal_pressure", "Heavy"),
    ],
)
def test_a_field_that_is_odd_is_left_out(line: str, field: str, value: object) -> None:
    text = f"*** Sampled system activity ***\n{line}\nGPU idle residency: 50.00%\n"
    [reading] = readings([text.encode()])
    assert getattr(reading, field) == value


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("<real>371.416</real>", "<real>371416000</real>", "active_frequency_mhz", 371.416),
        ("<real>371.416</real>", "<real>371416</real>", "active_frequency_mhz", None),
        ("<real>371.416</real>", "<string>fast</string>", "active_frequency_mhz", None),
        ("<real>371.416</real>", "<real>nan</real>", "active_frequency_mhz", None),
        ("<real>371.416</real>", "<true/>", "active_frequency_mhz", None),
        ("<integer>202</integer>", f"<integer>{10**400}</integer>", "power_mw", None),
        ("<key>elapsed_ns</key>", "<key>elapsed</key>", "power_mw", None),
        # A missing ratio is made from the nanoseconds.
        ("<key>idle_ratio</key>", "<key>idle</key>", "active_ratio", 0.15),
        ("<string>Nominal</string>", "<array/>", "thermal_pressure", None),
        ("<string>Mac17,9</string>", "<string>a b</string>", "machine", None),
    ],
)
def test_a_value_of_a_property_list_that_is_odd_is_left_out(
    old: str, new: str, field: str, value: object
) -> None:
    text = (DATA / "p4.plist").read_text()
    assert old in text
    [reading] = readings([text.replace(old, new).encode()])
    assert getattr(reading, field) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\n",
        b"<",
        b"<plist></plist>",
        b"<plist><array/></plist>",
        b"<plist><dict><key>gpu</key><array/></dict></plist>",
        b"<plist><dict><key>timestamp</key><date>soon</date></dict></plist>",
        b"powermetrics must be invoked as the superuser\n",
        b"\xff\xfe*\0*\0",
    ],
)
def test_what_is_no_sample_gives_none(data: bytes) -> None:
    assert list(readings([data])) == []


def test_a_broken_document_costs_only_itself() -> None:
    good = (DATA / "p4.plist").read_bytes()
    assert len(list(readings([good, b"\0<plist><dict><key></plist>", good]))) == 2


def test_an_endless_line_does_not_fill_the_memory() -> None:
    noise = [b"x" * 2**20] * 20
    [reading] = readings([*noise, b"\n", (DATA / "t1.txt").read_bytes()])
    assert reading.power_mw == 17


# The text grammar: what is rendered is read back.

percents = st.integers(0, 10000).map(lambda hundredths: hundredths / 100)
frequencies = st.lists(st.tuples(st.integers(200, 3000), percents), max_size=20)


def percent(value: float) -> str:
    """As powermetrics rounds them: `  0%`, `.19%`, `1.6%`, ` 12%`."""
    if 0 < value < 1:
        return f"{value:.2f}%".lstrip("0")
    return f"{value:.1f}%" if 1 <= value < 10 else f"{value:3.0f}%"


def ratio(value: float) -> float:
    return round(float(percent(value).strip(" %")) / 100, 9)


def listed(names: Sequence[str], shares: Sequence[float]) -> str:
    items = [f"{name}: {percent(share)}" for name, share in zip(names, shares, strict=True)]
    return f"({' '.join(items)})"


@settings(deadline=None)
@given(
    active=percents,
    mhz=st.integers(0, 3000),
    milliwatts=st.integers(0, 200_000),
    states=frequencies,
    hardware=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    indent=st.sampled_from(["", "  ", "\t"]),
    data=st.data(),
)
def test_what_is_rendered_is_read_back(
    active: float,
    mhz: int,
    milliwatts: int,
    states: list[tuple[int, float]],
    hardware: bool,
    newline: str,
    indent: str,
    data: st.DataObject,
) -> None:
    shares = [share for _, share in states]
    label = "GPU HW" if hardware else "GPU"
    names = [f"P{n} " for n in range(1, len(states) + 1)]
    lines = [
        "*** Sampled system activity (Tue Mar 10 10:20:30 2026 +0100) (1002.50ms elapsed) ***",
        f"{label} active frequency: {mhz} MHz",
        f"{label} active residency: {active:6.2f}% {listed([f'{f} MHz' for f, _ in states], shares)}",
        f"GPU SW requested state: {listed(names, shares)}",
        f"GPU SW state: {listed([f'SW_{name}' for name in names], shares)}",
        f"GPU idle residency: {100 - active:6.2f}%",
        f"GPU Power: {milliwatts} mW",
    ]
    stream = "".join(indent + line + newline for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    expected = GpuReading(
        source="powermetrics",
        elapsed_s=1.0025,
        active_ratio=round(float(f"{active:.2f}") / 100, 9),
        active_frequency_mhz=mhz,
        frequencies=tuple(FrequencyShare(f, ratio(share)) for f, share in states),
        requested=tuple(StateShare(f"P{n}", ratio(share)) for n, share in enumerate(shares, 1)),
        granted=tuple(StateShare(f"SW_P{n}", ratio(share)) for n, share in enumerate(shares, 1)),
        power_mw=milliwatts,
    )
    assert list(readings(pieces)) == [expected]


@settings(deadline=None)
@given(st.lists(st.binary()))
def test_any_bytes_are_survived(chunks: list[bytes]) -> None:
    list(readings(chunks))


@settings(deadline=None)
@given(st.lists(st.sampled_from((DATA / "t8.txt").read_text().splitlines()), max_size=12))
def test_lines_in_any_order_are_survived(lines: list[str]) -> None:
    for reading in readings(["\n".join(lines).encode()]):
        assert reading.active_ratio in (None, 0.1357, 0.998)
        assert reading.power_mw in (None, 52, 8117)
