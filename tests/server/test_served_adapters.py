"""LoRA adapters by their names, from a real server over a tiny model."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.tuner.utils import load_adapters

import adapter_writer
import tiny_embedders
import tiny_folder
import tiny_models
from server_process import METAL, ServerProcess

PROMPT = [72, 105, 33] * 30
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of mlx-lm's with a link to a file that has gone, and one of PEFT's with its twin of mlx-lm's."""
    root, model = tmp_path_factory.mktemp("adapters"), tiny_models.make("llama")
    first, second = adapter_writer.matrices(model, seed=1), adapter_writer.matrices(model, seed=2, rank=3)
    written = adapter_writer.write_mlx(root / "first", first)
    (written / "adapters-old.safetensors").symlink_to("gone")
    return {
        "first": written,
        "second": adapter_writer.write_peft(root / "second", second),
        "second's twin": adapter_writer.write_mlx(root / "twin", second),
    }


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Path]) -> dict[str, list[int]]:
    """What mlx-lm's own LoRA layers make of the prompt."""

    def greedy(model: Any) -> list[int]:
        model.eval()
        token_ids = list(PROMPT)
        for _ in range(MAX_TOKENS):
            token_ids.append(mx.argmax(model(mx.array([token_ids]))[0, -1]).item())
        return token_ids[len(PROMPT) :]

    return {
        "tiny": greedy(tiny_models.make("llama")),
        "first": greedy(load_adapters(tiny_models.make("llama"), str(adapters["first"]))),
        "second": greedy(load_adapters(tiny_models.make("llama"), str(adapters["second's twin"]))),
    }


@pytest.fixture(scope="module")
def server(folder: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    named = [f"--lora-modules={name}={adapters[name]}" for name in ("first", "second")]
    with ServerProcess(str(folder), "--enable-lora", *named, env={}) as process:
        yield process.ready()


def ask(server: ServerProcess, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    status, answer = server.post(
        "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    )
    assert status == 200, answer
    return answer


def test_requests_for_several_run_side_by_side(server: ServerProcess, expected: dict[str, list[int]]) -> None:
    assert len({tuple(token_ids) for token_ids in expected.values()}) == 3
    models = 3 * list(expected)
    with ThreadPoolExecutor(len(models)) as threads:
        answers = list(threads.map(lambda model: ask(server, model), models))
    assert [answer["model"] for answer in answers] == models
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected[model] for model in models]


def test_the_list_says_whose_they_are(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert {"tiny", "first", "second"} <= listed.keys()
    assert [listed[name].get("parent") for name in ("tiny", "first", "second")] == [None, "tiny", "tiny"]
    assert client.models.retrieve("second").model_dump()["parent"] == "tiny"


def test_chats_and_streams_have_their_name(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "Hi"}]
    with client.chat.completions.create(
        model="first", messages=messages, max_tokens=3, stream=True
    ) as chunks:
        assert {chunk.model for chunk in chunks} == {"first"}
    assert client.chat.completions.create(model="second", messages=messages, max_tokens=3).model == "second"


def test_others_are_not_found(server: ServerProcess) -> None:
    status, answer = server.post("/v1/completions", {"model": "third", "prompt": "Hi"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_the_configuration_names_them_too(folder: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"[models]\ndefault = '{folder}'\n[models.adapters]\nfirst = '{adapters['first']}'\n")
    with ServerProcess("--config", str(config), env={}) as process:
        assert ask(process.ready(), "first")["model"] == "first"


def test_a_model_is_loaded_for_its_adapter(
    folder: Path, adapters: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = tmp_path / "config.toml"
    config.write_text(
        f"[models]\ndefault = '{folder}'\naliases = {{ other = '{other}' }}\n"
        f"adapters = {{ second = '{adapters['second']}' }}\n"
        f"[models.other.adapters]\nfirst = '{adapters['first']}'\n"
    )
    with ServerProcess("--config", str(config), env={}) as process:
        for model in ("first", "second"):
            answer = ask(process, model)
            assert answer["model"] == model
            assert answer["choices"][0]["token_ids"] == expected[model]
        _, listed = process.get("/v1/models")
        parents = {model["id"]: model["parent"] for model in listed["data"]}
        assert parents == {"tiny": None, "second": "tiny", "other": None, "first": "other"}


def test_a_name_of_two_things_ends_the_start(folder: Path, adapters: dict[str, Path]) -> None:
    process = subprocess.run(
        [METAL, "serve", str(folder), f"--lora-modules=tiny={adapters['first']}", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 1
    assert "error: `tiny` is the name of a model and of an adapter" in process.stderr


def test_an_adapter_that_does_not_fit_ends_the_start(folder: Path, tmp_path: Path) -> None:
    layers = {"model.layers.7.self_attn.q_proj": (mx.zeros((32, 4)), mx.zeros((4, 32)))}
    adapter = adapter_writer.write_mlx(tmp_path / "other", layers)
    with ServerProcess(str(folder), f"--lora-modules=other={adapter}", env={}) as process:
        assert process.process.wait(timeout=60) == 1
    assert "adapts `model.layers.7.self_attn.q_proj`, which this model does not have" in process.log
    assert "hint: it was made for another base model" in process.log


def test_models_that_embed_take_none(adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny_embedders.save_encoder(tmp_path / "encoder", next(iter(tiny_embedders.CONFIGS)))
    with ServerProcess(str(folder), f"--lora-modules=first={adapters['first']}", env={}) as process:
        assert process.process.wait(timeout=60) == 1
    assert "error: `encoder` does not generate text, so it takes no LoRA adapters" in process.log
