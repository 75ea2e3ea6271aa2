"""A Mac's user, with launchd at work for her until the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_launchctl import FakeLaunchd
from mac_user import User


@pytest.fixture
def launchd(tmp_path: Path) -> Iterator[FakeLaunchd]:
    (tmp_path / "home").mkdir()
    launchd = FakeLaunchd(tmp_path / "launchd", home=tmp_path / "home")
    yield launchd
    launchd.close()


@pytest.fixture
def user(tmp_path: Path, launchd: FakeLaunchd) -> User:
    user = User(tmp_path, tmp_path / "home", launchd)
    user.config()
    return user
