"""The dashboard and the page on monitoring speak of figures that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from exposed_figures import everything
from vllm_metal.monitor.exposition import render

DOCS = Path(__file__).parent.parent / "docs"
FAMILIES = list(text_string_to_metric_families(render(everything()).decode()))
SERIES = {sample.name for family in FAMILIES for sample in family.samples}
PAGE = (DOCS / "monitoring.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))


def _named(text: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|metal):\w+", text))


def test_every_query_of_the_dashboard_names_a_series_that_is_exported() -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert len(queries) > len(DASHBOARD["panels"])
    for query in queries:
        assert _named(query), query
        assert _named(query) <= SERIES, query


def test_its_queries_keep_to_the_model_where_figures_are_of_a_model() -> None:
    labelled = {sample.name for family in FAMILIES for sample in family.samples if sample.labels}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for name in _named(target["expr"]) & labelled:
                assert f'{name}{{model_name="$model_name"}}' in target["expr"]


def test_panels_do_not_overlap() -> None:
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]}
    assert len(places) == len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_page_tells_of_every_figure() -> None:
    # Histograms are named without the endings of their series.
    names = {family.name + ("_total" if family.type == "counter" else "") for family in FAMILIES}
    assert _named(PAGE) == names
