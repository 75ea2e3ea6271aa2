"""The API is as `/openapi.json` describes it, whatever is sent: schemathesis makes that up."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from client_process import run

import tiny_folder
from server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "a-key"


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key: that all but probes want it is a part of the description."""
    folder = tiny_folder.save(tmp_path_factory.mktemp("model") / "tiny")
    with ServerProcess(str(folder), env={"METAL_SERVER_API_KEYS": KEY}) as process:
        status, _ = process.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, AUTHORIZATION)
        assert status == 200, process.log
        yield process


AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}


def test_no_request_makes_it_lie(python_of, described, tmp_path):
    python = python_of("schemathesis")
    options = [
        *("--phases", "coverage,fuzzing"),
        *("--max-examples", "100"),
        "--generation-deterministic",
        *("--request-timeout", "60"),
        # No schema can tell all that makes a request nonsense, as an empty prompt is.
        *("--exclude-checks", "positive_data_acceptance"),
        *("--header", f"Authorization: Bearer {KEY}"),
    ]
    command = [python.parent / "schemathesis", "run", f"{described.url}/openapi.json", *options]
    said = run(command, cwd=tmp_path)
    _, description = described.get("/openapi.json", AUTHORIZATION)
    # The description itself it has read already.
    num_operations = sum(len(methods) for methods in description["paths"].values()) - 1
    assert re.search(rf"^  Tested: {num_operations}$", said, re.MULTILINE), said
    assert "Traceback" not in described.log
