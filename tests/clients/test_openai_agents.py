"""OpenAI's agents SDK, whose default are responses: calls, their results, what is kept, and streams."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_process import run

import scripted_model
from tool_call_writers import WRITERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parent / "scripts" / "openai_agents_client.py"


def test_a_tool_loop(python_of, tmp_path):
    call = f"<think>Hm.</think>{WRITERS['hermes']([('get_weather', {'place': 'Rome'})])}"
    with scripted_model.serving("hermes", "qwen3") as url:
        run([python_of("openai-agents"), "-I", SCRIPT, url, call], cwd=tmp_path)
