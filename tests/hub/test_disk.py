from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vllm_metal.errors import DownloadError
from vllm_metal.hub.disk import format_bytes, require_space


def test_space_of_a_folder_that_is_still_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_500_000_000)
    monkeypatch.setattr(shutil, "disk_usage", {tmp_path: usage}.__getitem__)
    require_space(tmp_path / "a" / "b", 1_500_000_000)
    with pytest.raises(DownloadError, match=r"not enough disk space: 4\.3 GB needed, 1\.5 GB free") as caught:
        require_space(tmp_path / "a" / "b", 4_300_000_000)
    assert "HF_HOME" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (999_949_999, "999.9 MB"),
        (999_950_000, "1.0 GB"),
        (2_500_000_000_000, "2.5 TB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
