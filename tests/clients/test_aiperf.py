"""AIPerf, a load generator: what it measures is what the server did."""

from __future__ import annotations

import json

import pytest
from client_guide import snippet
from client_process import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_guides_command(python_of, server, hub_cache, tmp_path):
    command = snippet("AIPerf", "sh", server.url)
    bin_folder = python_of("aiperf").parent
    run(["bash", "-c", command], cwd=tmp_path, bin_folder=bin_folder, HF_HOME=str(hub_cache))
    [report] = tmp_path.rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
    assert figures["error_summary"] == []
    assert figures["request_count"]["avg"] == 8
    assert figures["total_usage_completion_tokens"]["avg"] == 64
    assert figures["time_to_first_token"]["avg"] > 0
    [report] = tmp_path.rglob("server_metrics_export.json")
    assert json.loads(report.read_text())["summary"]["endpoints_successful"] == [f"{server.url}/metrics"]
