"""What `metal doctor` says of the service, with launchd at work."""

from __future__ import annotations

import json
import plistlib
import subprocess
from pathlib import Path
from typing import Any

from fake_launchctl import FakeLaunchd
from mac_user import DEADLINE_S, User
from server_process import METAL


def finding(user: User, subject: str = "service") -> dict[str, Any]:
    done = subprocess.run(
        [METAL, "doctor", "--json", "--no-probe"],
        env=user.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    (found,) = [each for each in json.loads(done.stdout) if each["subject"] == subject]
    return dict(found)


def test_from_none_to_one_that_macos_holds_back(user: User, launchd: FakeLaunchd, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    user.config(model=tmp_path / "empty")
    assert finding(user)["level"] == "skipped"

    user.does("install")
    user.status_when(lambda status: "is empty" in (status["health_detail"] or ""))
    found = finding(user)
    assert found["level"] == "warning"
    assert "the server has no model" in found["message"]
    assert finding(user, "model folders")["level"] == "ok"

    # As a user who has read that daemons are background processes would have it.
    entries = plistlib.loads(user.plist.read_bytes())
    user.plist.write_bytes(plistlib.dumps(entries | {"ProcessType": "Background"}))
    launchd.call("bootout", f"{user.status()['domain']}/org.vllm-metal.serve")
    launchd.call("bootstrap", user.status()["domain"], str(user.plist))
    user.status_when(lambda status: status["process_type"] and "is empty" in (status["health_detail"] or ""))
    found = finding(user)
    assert found["level"] == "problem"
    assert "`background" in found["message"]
    assert "eight times" in found["why"]
