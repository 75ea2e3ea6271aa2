from __future__ import annotations

import pytest

from vllm_metal.cli.progress import plain_lines, pull_progress
from vllm_metal.hub.progress import PullProgress


def test_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    show = plain_lines(clock=lambda: now_s)
    show(PullProgress("looking up `org/model`"))
    for percent in range(101):
        show(PullProgress("downloading `org/model`", percent * 10_000_000, 1_000_000_000))
        now_s += 1.0
    assert capsys.readouterr().err.splitlines() == [
        "looking up `org/model`",
        "downloading `org/model`",
        *(f"downloading `org/model`: {n}% ({n * 10:.1f} MB of 1.0 GB)" for n in range(5, 100, 5)),
        "downloading `org/model`: 100% (1.0 GB of 1.0 GB)",
    ]


def test_fast_download_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show = plain_lines(clock=lambda: 0.0)
    for percent in range(101):
        show(PullProgress("downloading `org/model`", percent, 100))
    assert capsys.readouterr().err == "downloading `org/model`\n"


def test_stage_without_bytes_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pull_progress() as show:
        show(PullProgress("unpacking"))
        show(PullProgress("unpacking"))
    assert capsys.readouterr().err == "unpacking\n"
