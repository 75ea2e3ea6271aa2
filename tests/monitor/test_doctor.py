from __future__ import annotations

from collections.abc import Iterator

from vllm_metal.monitor.doctor import examine
from vllm_metal.monitor.finding import Finding
from vllm_metal.monitor.surroundings import Surroundings, gather


def test_a_check_that_fails_costs_only_itself() -> None:
    def bent_ruler(surroundings: Surroundings) -> Iterator[Finding]:
        yield Finding("ok", "first", "found before")
        raise ZeroDivisionError("nothing there")

    def last(surroundings: Surroundings) -> Iterator[Finding]:
        yield Finding("ok", "last", "found after")

    found = list(examine(gather(environ={}), [bent_ruler, last]))
    assert [finding.subject for finding in found] == ["first", "bent ruler", "last"]
    assert found[1].level == "warning"
    assert "ZeroDivisionError: nothing there" in found[1].message
