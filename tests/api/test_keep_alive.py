"""Ollama's ways to say for how long."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.api.keep_alive import seconds
from vllm_metal.errors import InvalidRequest


@pytest.mark.parametrize(
    ("keep_alive", "expected"),
    [
        (None, None),
        (0, 0),
        (300, 300),
        (1.5, 1.5),
        (-1, math.inf),
        ("0", 0),
        ("-1", math.inf),
        ("3600", 3600),
        ("5m", 300),
        (" 24h ", 86400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("250ms", 0.25),
        ("-1m", math.inf),
        ("+2m", 120),
    ],
)
def test_durations(keep_alive, expected):
    assert seconds(keep_alive) == expected


@pytest.mark.parametrize(
    "keep_alive", ["", "soon", "5x", "m", "1h 30m", "٣", "1e3", "-", "5m" * 9, "9" * 400]
)
def test_what_is_none(keep_alive):
    with pytest.raises(InvalidRequest, match="`keep_alive` must be") as refused:
        seconds(keep_alive)
    assert refused.value.param == "keep_alive"


@given(st.text(st.sampled_from("0123456789.hmsuµn+- "), max_size=20) | st.text())
def test_any_text_is_a_duration_or_refused(text):
    with suppress(InvalidRequest):
        assert seconds(text) >= 0
