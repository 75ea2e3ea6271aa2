"""Pulls that are killed, cut, refused and doubled, of a hub on loopback and with the hub's own client."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_hub import PIECE, FakeHub, Repository
from pulling_machine import Machine

SIZE = 8_000_000
SHARDS = {f"model-0000{n}-of-00002.safetensors": random.Random(n).randbytes(SIZE) for n in (1, 2)}
INDEX = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()
WEIGHTS = "model.safetensors"
FIRST = "model-00001-of-00002.safetensors"
CONFIG = b'{"model_type": "llama"}'
SHARDED = {"config.json": CONFIG, "model.safetensors.index.json": INDEX, **SHARDS}
LARGE = {"config.json": CONFIG, WEIGHTS: SHARDS[FIRST]}
BLOB = hashlib.sha256(LARGE[WEIGHTS]).hexdigest()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def hub() -> FakeHub:
    hub = FakeHub()
    hub.repositories["org/large"] = Repository(dict(LARGE))
    hub.repositories["org/sharded"] = Repository(dict(SHARDED))
    return hub


@pytest.fixture
def endpoint(hub: FakeHub) -> Iterator[str]:
    with hub.serving() as url:
        yield url


def partial(machine: Machine) -> Path:
    return machine.blobs("org/large") / f"{BLOB}.incomplete"


def kill_after(num_bytes: int, machine: Machine, hub: FakeHub, endpoint: str) -> int:
    """Kill a pull once the hub has sent so much of the weights; returns how much of it is on disk."""
    hub.released.clear()
    hub.repositories["org/large"].hold_after[WEIGHTS] = num_bytes
    with machine.start("org/large", endpoint) as process:
        assert hub.held.acquire(timeout=60)
        process.kill()
    hub.released.set()
    return partial(machine).stat().st_size


def test_killed_at_ten_points_it_ends_with_verified_files(
    machine: Machine, hub: FakeHub, endpoint: str
) -> None:
    starts = [0]
    for tenth in range(10):
        starts.append(kill_after(tenth * SIZE // 10 + tenth, machine, hub, endpoint))

    assert machine.pull("org/large", endpoint, HF_HUB_OFFLINE="1")["error"] == "DownloadError"
    assert machine.pull("org/large", endpoint)["name"] == "org/large"
    assert machine.files("org/large") == LARGE
    assert hub.ranges(f"org/large/{WEIGHTS}") == [f"bytes={start}-{SIZE - 1}" for start in starts]
    assert starts == sorted(starts)
    # Only what a process had not written yet was sent again, beside the pieces that a dead one cannot refuse.
    lost = sum(tenth * SIZE // 10 + tenth - start for tenth, start in enumerate(starts[1:]))
    assert SIZE <= hub.num_sent[f"org/large/{WEIGHTS}"] <= SIZE + lost + 10 * 3 * PIECE
    assert not list(machine.cache.rglob("*.incomplete"))


def test_what_was_killed_after_the_last_byte_asks_for_none_past_it(
    machine: Machine, hub: FakeHub, endpoint: str
) -> None:
    partial(machine).parent.mkdir(parents=True)
    partial(machine).write_bytes(LARGE[WEIGHTS])
    machine.pull("org/large", endpoint)
    assert machine.files("org/large") == LARGE
    assert hub.ranges(f"org/large/{WEIGHTS}") == []


def test_the_hubs_own_client_reads_what_was_pulled(machine: Machine, endpoint: str) -> None:
    path = machine.pull("org/sharded", endpoint)["path"]
    program = """
import sys
from huggingface_hub import scan_cache_dir, snapshot_download, try_to_load_from_cache

(repo,) = scan_cache_dir().repos
assert not scan_cache_dir().warnings
print(repo.repo_id, repo.size_on_disk, repo.nb_files)
print(snapshot_download(repo.repo_id, allow_patterns=["*.json", "*.safetensors"]))
print(try_to_load_from_cache(repo.repo_id, "model-00002-of-00002.safetensors"))
"""
    env = machine.environ(endpoint, HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    size = sum(map(len, SHARDED.values()))
    assert (
        done.stdout.split() == f"org/sharded {size} 4 {path} {path}/model-00002-of-00002.safetensors".split()
    )


@pytest.mark.parametrize("was_whole", [False, True])
def test_a_damaged_rest_is_fetched_anew(
    machine: Machine, hub: FakeHub, endpoint: str, was_whole: bool
) -> None:
    if was_whole:
        machine.pull("org/large", endpoint)
        (machine.blobs("org/large") / BLOB).unlink()
    partial(machine).parent.mkdir(parents=True, exist_ok=True)
    partial(machine).write_bytes(b"x" * 1000)
    machine.pull("org/large", endpoint)
    assert machine.files("org/large") == LARGE
    assert hub.ranges(f"org/large/{WEIGHTS}")[-2:] == [f"bytes=1000-{SIZE - 1}", f"bytes=0-{SIZE - 1}"]


def test_a_rest_that_is_too_long_is_fetched_anew(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    partial(machine).parent.mkdir(parents=True)
    partial(machine).write_bytes(bytes(SIZE + 1))
    machine.pull("org/large", endpoint)
    assert machine.files("org/large") == LARGE
    assert hub.ranges(f"org/large/{WEIGHTS}") == [f"bytes=0-{SIZE - 1}"]


@pytest.mark.parametrize("extra", [b"", b"y"])
def test_a_file_of_another_content_is_discarded(
    machine: Machine, hub: FakeHub, endpoint: str, extra: bytes
) -> None:
    repository = hub.repositories["org/large"]
    repository.served_as[WEIGHTS] = b"x" * SIZE + extra
    repository.knows_ranges = not extra
    answer = machine.pull("org/large", endpoint)
    assert answer["error"] == "DownloadError"
    assert answer["message"].startswith(
        f"`{WEIGHTS}` " + ("is longer" if extra else "came with another content")
    )
    assert "discarded" in answer["hint"]
    assert not list(machine.cache.rglob("blobs/*"))

    repository.served_as.clear()
    assert machine.pull("org/large", endpoint)["name"] == "org/large"


@pytest.mark.parametrize("statuses", [[408, 429, 500], [502, 503, 504]])
def test_a_refusal_of_the_moment_is_tried_again(
    machine: Machine, hub: FakeHub, endpoint: str, statuses: list[int]
) -> None:
    hub.repositories["org/large"].refuse_with[WEIGHTS] = statuses
    assert machine.pull("org/large", endpoint)["name"] == "org/large"
    assert len(hub.ranges(f"org/large/{WEIGHTS}")) == 4


@pytest.mark.parametrize(
    ("statuses", "message", "num_requests"),
    [
        ([503] * 100, "the model hub answered HTTP 503 for `org/large`", 6),
        ([403], "the model hub refuses access to `org/large` (HTTP 403)", 1),
        ([404], "`org/large` is not on the model hub", 1),
        ([416], "the model hub answered HTTP 416 for `org/large`", 1),
    ],
)
def test_a_lasting_refusal_ends_the_pull_and_keeps_what_came(
    machine: Machine, hub: FakeHub, endpoint: str, statuses: list[int], message: str, num_requests: int
) -> None:
    hub.repositories["org/large"].refuse_with[WEIGHTS] = statuses
    partial(machine).parent.mkdir(parents=True)
    partial(machine).write_bytes(LARGE[WEIGHTS][:1000])
    answer = machine.pull("org/large", endpoint)
    assert answer["message"] == message
    assert len(hub.ranges(f"org/large/{WEIGHTS}")) == num_requests
    assert partial(machine).read_bytes() == LARGE[WEIGHTS][:1000]


def test_a_cut_connection_is_taken_up_where_it_broke(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/large"].cut_after[WEIGHTS] = 3_000_001
    answer = machine.pull("org/large", endpoint)
    assert machine.files("org/large") == LARGE
    assert hub.ranges(f"org/large/{WEIGHTS}") == [f"bytes=0-{SIZE - 1}", f"bytes=3000001-{SIZE - 1}"]
    assert answer["events"][-1]["done_bytes"] == answer["events"][-1]["total_bytes"]


def test_a_server_without_ranges_sends_all_again(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/large"].knows_ranges = False
    hub.repositories["org/large"].cut_after[WEIGHTS] = 3_000_001
    machine.pull("org/large", endpoint)
    assert machine.files("org/large") == LARGE


def test_files_come_side_by_side_each_with_its_progress(
    machine: Machine, hub: FakeHub, endpoint: str
) -> None:
    hub.repositories["org/sharded"].hold_after = dict.fromkeys(SHARDS, SIZE // 2)
    with machine.start("org/sharded", endpoint, f"tell_at={SIZE // 2}") as process:
        for _ in SHARDS:
            assert hub.held.acquire(timeout=60)
        assert process.stdout is not None
        assert process.stdout.readline() == f"at {SIZE // 2}\n"
        hub.released.set()
        events = json.loads(process.stdout.read().splitlines()[-1])["events"]
    assert machine.files("org/sharded") == SHARDED
    assert max(len(event["files"]) for event in events) == 2
    for event in events:
        assert event["done_bytes"] <= event["total_bytes"]
        for file in event["files"]:
            assert 0 <= file["done_bytes"] < file["total_bytes"] == SIZE


def test_two_processes_share_the_work(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/large"].hold_after[WEIGHTS] = SIZE // 2
    with machine.start("org/large", endpoint) as first:
        assert hub.held.acquire(timeout=60)
        with machine.start("org/large", endpoint, f"tell_at={SIZE // 2}") as second:
            assert second.stdout is not None
            assert second.stdout.readline() == f"at {SIZE // 2}\n"
            hub.released.set()
            answers = [
                json.loads(process.communicate(timeout=60)[0].splitlines()[-1]) for process in (first, second)
            ]
    assert answers[0]["path"] == answers[1]["path"]
    assert machine.files("org/large") == LARGE
    assert hub.ranges(f"org/large/{WEIGHTS}") == [f"bytes=0-{SIZE - 1}"]


def test_who_waits_goes_on_where_another_was_killed(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    hub.repositories["org/large"].hold_after[WEIGHTS] = SIZE // 2
    with machine.start("org/large", endpoint) as first:
        assert hub.held.acquire(timeout=60)
        with machine.start("org/large", endpoint, f"tell_at={SIZE // 2}") as second:
            assert second.stdout is not None
            assert second.stdout.readline() == f"at {SIZE // 2}\n"
            first.kill()
            first.wait()
            kept = partial(machine).stat().st_size
            answer: dict[str, Any] = json.loads(second.communicate(timeout=60)[0].splitlines()[-1])
    assert answer["name"] == "org/large"
    assert machine.files("org/large") == LARGE
    assert hub.ranges(f"org/large/{WEIGHTS}")[1] == f"bytes={kept}-{SIZE - 1}"


def test_an_error_of_the_callback_ends_the_pull(machine: Machine, hub: FakeHub, endpoint: str) -> None:
    answer = machine.pull("org/large", endpoint, "fail_after=0")
    assert (answer["error"], answer["message"]) == ("OSError", "the reader has gone")
    assert not list(machine.cache.rglob("snapshots/*"))


def test_an_interrupt_ends_the_pull_though_the_hub_is_silent(
    machine: Machine, hub: FakeHub, endpoint: str
) -> None:
    hub.repositories["org/large"].hold_after[WEIGHTS] = SIZE // 2
    with machine.start("org/large", endpoint, f"tell_at={SIZE // 2}") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"at {SIZE // 2}\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert json.loads(process.stdout.read())["error"] == "KeyboardInterrupt"
    hub.released.set()
    assert partial(machine).read_bytes() == LARGE[WEIGHTS][: SIZE // 2]
