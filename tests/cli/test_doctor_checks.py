"""`metal doctor` on the GPU, the model, the service and the daemon under load, with each fault injected."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from doctor_run import DATA, doctor, faults, generates, of_another, prepare, running
from fake_mac import FakeMac
from scripted_server import Handler, Script, chunk, event, refuses, replies, serving, streams
from vllm_metal.cli.main import app
from vllm_metal.monitor import active_probe, mlx_process
from vllm_metal.monitor.host import read
from vllm_metal.service import package, venv

GB = 10**9
SMALL: dict[str, Any] = {
    "kind": "MLX",
    "number_format": "4-bit",
    "quantized_by": None,
    "weight_bytes": GB,
    "context_length": 10_000,
    "kv_bytes_per_token": 10_000,
    "working_set_bytes": 20 * GB,
}


@pytest.fixture
def mac(tmp_path: Path) -> FakeMac:
    return FakeMac(tmp_path / "mac")


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        yield script


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, mac: FakeMac, server: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, mac, server, monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file that begins as models do: what is in it, the Mac's programs say."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


PITFALLS: dict[str, tuple[Callable[[FakeMac, Script], None], dict[str, str], str]] = {
    "Rosetta": (lambda mac, _: mac.set("sysctl.proc_translated", "1"), {}, "Python"),
    "an old macOS": (lambda mac, _: mac.set_version("13.7"), {}, "macOS"),
    "the CPU by environment": (lambda *_: None, {"VLLM_MLX_DEVICE": "cpu"}, "device"),
    "the format": (
        lambda mac, _: mac.tell("footprint", {"error": "tensors of type `Q6_K`", "hint": "take another"}),
        {},
        "model",
    ),
    "memory": (
        lambda mac, _: mac.tell("footprint", SMALL | {"weight_bytes": 19 * GB}),
        {},
        "model's memory",
    ),
    "the moment of the sample": (
        lambda _, server: server.on("/metrics", replies(running(0))),
        {},
        "under load",
    ),
}


@pytest.mark.parametrize("name", PITFALLS)
def test_each_pitfall_is_found_and_nothing_else(name: str, mac: FakeMac, server: Script, model: str) -> None:
    mac.tell("footprint", SMALL)
    code, found = doctor(METAL_MODELS_DEFAULT=model)
    assert (code, faults(found)) == (0, {})
    inject, variables, subject = PITFALLS[name]
    inject(mac, server)
    _, found = doctor(METAL_MODELS_DEFAULT=model, **variables)
    assert faults(found).keys() == {subject}
    assert found[subject]["why"]
    assert found[subject]["hint"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -SEGV $$", "MLX crashed: it was ended by signal 11"),
        ("echo 'RuntimeError: no driver' >&2; exit 1", "MLX failed: RuntimeError: no driver"),
        ("echo '[]'", "MLX failed: exit code 0"),
        ("echo '{'", "MLX failed: exit code 0"),
        ("exec sleep 100", "MLX gave no answer within 0.3 s"),
        ("""echo '{"gpu": null}'""", "MLX finds no Metal GPU"),
        (
            """echo '{"gpu": "M4", "difference": 0.5}'""",
            "M4 computes other figures than the CPU, off by 50.0%",
        ),
        (
            """echo '{"gpu": "M4", "difference": NaN}'""",
            "M4 computes other figures than the CPU, off by nan%",
        ),
    ],
)
def test_a_gpu_that_does_not_compute(
    mac: FakeMac, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(mlx_process, "_TIMEOUT_S", 0.3)
    mac.run_instead("gpu_check", script)
    code, found = doctor("--no-probe")
    assert code == 1
    assert found["GPU"]["level"] == "problem"
    assert found["GPU"]["message"] == words
    assert faults(found).keys() == {"GPU"}


@pytest.mark.parametrize(
    ("changes", "level", "message"),
    [
        ({}, "ok", "MLX, 4-bit, 10000 tokens of context"),
        ({"kind": "GGUF", "number_format": "Q4_1"}, "ok", "GGUF, Q4_1, "),
        ({"kind": "plain safetensors", "number_format": "bfloat16"}, "ok", "plain safetensors, bfloat16, "),
        ({"kind": "plain safetensors", "number_format": None}, "ok", "plain safetensors, unknown format, "),
        (
            {"kind": "plain safetensors", "number_format": None, "quantized_by": "awq"},
            "warning",
            "quantized by `awq` for other programs",
        ),
    ],
)
def test_formats(mac: FakeMac, model: str, changes: dict[str, Any], level: str, message: str) -> None:
    mac.tell("footprint", SMALL | changes)
    _, found = doctor("--no-probe", METAL_MODELS_DEFAULT=model)
    assert found["model"]["level"] == level
    assert message in found["model"]["message"]


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    code, found = doctor("--no-probe", METAL_MODELS_DEFAULT=str(tmp_path / "gone"))
    assert code == 1
    assert found["model"]["level"] == "problem"
    assert "does not exist" in found["model"]["message"]
    _, found = doctor("--no-probe", METAL_MODELS_DEFAULT="org/name", METAL_MODELS_REVISION="v1")
    assert found["model"]["level"] == "skipped"
    assert found["model"]["message"].startswith("`org/name@v1` is not here yet")


@pytest.mark.parametrize(
    ("changes", "level", "hint"),
    [
        ({"weight_bytes": 17 * GB}, "ok", None),
        # KV alone is too much: 19.5 of 20 GB would do.
        (
            {"weight_bytes": 17 * GB, "context_length": 250_000},
            "warning",
            "set `engine.gpu_memory_utilization = 0.98`",
        ),
        ({"weight_bytes": 19 * GB}, "problem", "set `engine.gpu_memory_utilization = 0.96`"),
        ({"weight_bytes": 17 * GB, "context_length": 10**6}, "warning", "`engine.max_model_len = 100000`"),
        (
            {"weight_bytes": 19 * GB, "context_length": 10**6},
            "problem",
            "set `engine.gpu_memory_utilization = 1.0`, or take a smaller",
        ),
        ({"weight_bytes": 21 * GB}, "problem", "take a smaller or more quantized model"),
        ({"weight_bytes": 17 * GB, "kv_bytes_per_token": None, "context_length": 10**9}, "ok", None),
        ({"working_set_bytes": None}, "skipped", None),
    ],
)
def test_a_model_that_does_not_fit(
    mac: FakeMac, model: str, changes: dict[str, Any], level: str, hint: str | None
) -> None:
    mac.tell("footprint", SMALL | changes)
    _, found = doctor("--no-probe", METAL_MODELS_DEFAULT=model)
    finding = found["model's memory"]
    assert finding["level"] == level
    assert (hint in finding["hint"]) if hint else finding["hint"] is None


def test_memory_that_others_have(mac: FakeMac, server: Script, model: str) -> None:
    available = read().memory_available_bytes
    # Half of the GPU's share is all that macOS has left.
    mac.tell(
        "footprint",
        SMALL
        | {"weight_bytes": available // 2, "working_set_bytes": 2 * available, "context_length": available},
    )
    server.on("/ready", replies({"status": "loading", "stage": "loading"}, 503))
    variables = {"METAL_MODELS_DEFAULT": model, "METAL_ENGINE_MAX_MODEL_LEN": str(available // 15_000)}
    _, found = doctor("--no-probe", **variables)
    assert found["model's memory"]["level"] == "warning"
    assert "or set `engine.gpu_memory_utilization = 0." in found["model's memory"]["hint"]
    # A server that has loaded the model has that memory itself.
    server.on("/ready", replies({"status": "ok"}))
    assert doctor("--no-probe", **variables)[1]["model's memory"]["level"] == "ok"


def test_a_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    monkeypatch.setenv("VLLM_METAL_VENV", str(folder))
    stamp = venv.Stamp(
        version="0.0.1",
        package_sha256=package.sha256(),
        lock_sha256="",
        python_version=".".join(map(str, sys.version_info[:3])),
        python=sys.executable,
        launcher="",
    )
    stamp.write(folder)
    assert doctor("--no-probe")[1]["venv"]["level"] == "ok"
    dataclasses.replace(stamp, package_sha256="another").write(folder)
    found = doctor("--no-probe")[1]["venv"]
    assert found["level"] == "warning"
    assert found["hint"] == "run `metal setup`"


def test_a_folder_that_the_server_cannot_read(server: Script) -> None:
    folders = [
        {"path": "/models", "readable": True},
        {"path": "/Desktop", "readable": False, "detail": "not permitted"},
    ]
    server.on("/admin/model-folders", replies({"folders": folders}))
    code, found = doctor("--no-probe")
    assert code == 1
    assert found["model folders"]["message"] == "the server cannot read `/Desktop` (not permitted)"
    assert "Full Disk Access" in found["model folders"]["hint"]


def test_a_gpu_that_works_under_load(mac: FakeMac, server: Script) -> None:
    _, found = doctor()
    assert found["under load"]["level"] == "ok"
    assert found["under load"]["message"].startswith("fully loaded: 95% utilised")
    mac.show(powermetrics=DATA / "loaded.txt")
    # Root is asked for nothing unless the user wants it.
    assert doctor()[1]["under load"]["message"].startswith("fully loaded: 95% utilised")
    _, found = doctor("--power")
    assert found["under load"]["message"].startswith("fully loaded: 100% active, 754 of 1578 MHz, 21.2 W")
    assert server.next_chat().body["ignore_eos"] is True


def test_a_gpu_that_idles_under_load(mac: FakeMac) -> None:
    mac.show(ioreg=DATA / "ioreg_m4_idle.txt")
    code, found = doctor()
    assert code == 1
    assert found["under load"]["level"] == "problem"
    assert "idle, though 4 requests run" in found["under load"]["message"]
    assert "the device that `metal ps` shows" in found["under load"]["hint"]


def test_a_gpu_that_is_loaded_without_power(mac: FakeMac, tmp_path: Path) -> None:
    recording = tmp_path / "recording.txt"
    text = (DATA / "loaded.txt").read_text()
    assert "GPU Power: 21200 mW" in text
    recording.write_text(text.replace("GPU Power: 21200 mW", "GPU Power: 12 mW"))
    mac.show(powermetrics=recording)
    _, found = doctor("--power")
    assert found["under load"]["level"] == "warning"
    assert "suspicious" in found["under load"]["message"]


def test_a_refusal_of_root_s_figures_is_told_beside_the_others(mac: FakeMac) -> None:
    mac.refuse_sudo()
    code, found = doctor("--power")
    assert code == 0
    assert found["under load"]["level"] == "ok"
    assert found["power"]["level"] == "warning"
    assert "a password is required" in found["power"]["message"]
    assert "`sudo -v`" in found["power"]["hint"]


def test_where_nothing_tells_of_a_gpu_the_engine_s_figures_do(mac: FakeMac) -> None:
    (mac.folder / "ioreg.txt").unlink()
    _, found = doctor()
    assert found["under load"]["level"] == "ok"


def test_a_server_that_refuses_to_generate(server: Script) -> None:
    server.on_chat(refuses(429, "too many requests", Retry_After="1"))
    _, found = doctor()
    assert found["under load"]["level"] == "warning"
    assert found["under load"]["message"] == "the server does not generate: too many requests"


def test_a_server_that_lets_only_some_in(server: Script) -> None:
    server.on_chat(refuses(429, "too many requests", Retry_After="1"), generates)
    _, found = doctor()
    assert found["under load"]["level"] == "ok"


def test_another_server_is_given_no_work(server: Script) -> None:
    server.on("/health", of_another(replies({"status": "ok"})))
    _, found = doctor()
    assert found["under load"]["level"] == "skipped"
    server.on("/admin/model-folders", replies({}))
    assert doctor()[1]["model folders"]["level"] == "skipped"
    while not server.received.empty():
        assert server.received.get().path in ("/health", "/admin/model-folders", "/metrics")


def test_thoughts_are_generated_too(server: Script) -> None:
    def thinks(handler: Handler) -> None:
        handler.begin_events()
        while True:
            handler.send_chunk(event(chunk(reasoning="hm")))
            time.sleep(0.01)

    server.on_chat(thinks)
    assert doctor()[1]["under load"]["level"] == "ok"


def test_a_server_whose_answers_are_empty(server: Script) -> None:
    server.on_chat(streams())
    _, found = doctor()
    assert found["under load"]["message"] == "the server does not generate: its answers are empty"


def test_a_server_that_generates_nothing(server: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_probe, "_FIRST_TOKEN_TIMEOUT_S", 0.3)
    server.on_chat(server.hangs_after())
    monkeypatch.setattr(active_probe, "_END_TIMEOUT_S", 0.0)
    _, found = doctor()
    assert "no token came" in found["under load"]["message"]


def test_a_bundle_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "VLLM_API_KEY": "first-secret",
        "HF_TOKEN": "second-secret",
        "HUGGING_FACE_HUB_TOKEN": "third-secret",
    }
    log = tmp_path / "metal.log"
    log.write_text(
        "\n".join(["POST /v1/models 200", *secrets.values(), "hf_abcdefghijkl sk-proj-1234567890"])
        + f"\nAuthorization: Bearer fourth-secret\nloaded {tmp_path}/model\n"
        + "no answer from http://me:fifth-secret@proxy:80/\n"
    )
    bundle = tmp_path / "report.zip"
    _, found = doctor("--bundle", str(bundle), METAL_LOG_FILE=str(log), **secrets)
    assert bundle.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(bundle) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert texts.keys() == {
        *(
            "doctor.json",
            "config.json",
            "versions.json",
            "status.json",
            "metrics.txt",
            "metal.log",
            "stdio.log",
        )
    }
    everything = "".join(texts.values())
    assert "secret" not in everything.replace("kept secret", "")
    assert "hf_abc" not in everything
    assert "sk-proj" not in everything
    assert str(tmp_path) not in everything
    assert "POST /v1/models 200" in texts["metal.log"]
    assert "loaded ~/model" in texts["metal.log"]
    assert {each["subject"] for each in json.loads(texts["doctor.json"])} == found.keys()
    assert json.loads(texts["config.json"])["server.api_keys"]["value"] == ["***"]
    assert "mlx" in json.loads(texts["versions.json"])["packages"]
    assert "vllm:num_requests_running" in texts["metrics.txt"]


def test_a_bundle_is_written_whatever_is_wrong(
    tmp_path: Path, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on_chat(refuses(401, "a key is needed, as `Authorization: Bearer KEY`"))
    monkeypatch.setenv("HOME", "")
    bundle = tmp_path / "report.zip"
    _, found = doctor("--bundle", str(bundle), METAL_LOG_FILE=str(tmp_path))
    with zipfile.ZipFile(bundle) as archive:
        assert archive.read(tmp_path.name).decode() == f"cannot read `{tmp_path}`: Is a directory"
        findings = json.loads(archive.read("doctor.json"))
    (refusal,) = [each for each in findings if each["subject"] == "under load"]
    assert refusal["message"] == found["under load"]["message"].replace("KEY", "***")


@pytest.mark.parametrize("name", ["there.zip", "no/such/folder.zip"])
def test_a_bundle_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "there.zip").write_text("mine")
    done = CliRunner().invoke(app, ["doctor", "--no-probe", "--bundle", str(tmp_path / name)])
    assert done.exit_code == 1
    assert "there.zip` exists already" in str(done.exception) or "cannot write" in str(done.exception)
    assert (tmp_path / "there.zip").read_text() == "mine"
