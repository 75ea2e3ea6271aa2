from __future__ import annotations

from xml.etree import ElementTree

import pytest

from vllm_metal.bench.plot import svg
from vllm_metal.bench.record import RequestRecord

SVG = "{http://www.w3.org/2000/svg}"


def record(started_s: float, *arrivals_s: float) -> RequestRecord:
    return RequestRecord(
        8, started_s, list(arrivals_s), max(arrivals_s, default=started_s), 4, len(arrivals_s)
    )


def lines(records: list[RequestRecord]) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg(records))
    assert root.tag == f"{SVG}svg"
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_three_panels_within_the_frame():
    records = [record(i / 10, *(i / 10 + 0.3 + j / 50 for j in range(40))) for i in range(20)]
    drawn = lines(records)
    assert len(drawn) == 3
    for points in drawn:
        assert all(56 <= x <= 404 and 40 <= y <= 236 for x, y in points)
        assert points == sorted(points, key=lambda point: point[0])
    for shares in drawn[:2]:
        assert shares[-1][1] == 40  # the last of a distribution is at share 1


def test_a_distribution_of_many_values_is_thinned_but_keeps_the_longest():
    steady = [i / 1000 for i in range(5000)]
    [_, gaps, _] = lines([record(0.0, *steady, 20.0)])
    assert len(gaps) <= 1100
    assert gaps[-1][0] > gaps[-2][0] + 100


@pytest.mark.parametrize("records", [[], [record(1.0)], [record(1.0, 1.0, 1.0)], [record(0.0, 0.5)]])
def test_little_or_nothing_measured(records: list[RequestRecord]):
    assert lines(records) is not None
