"""Models whose weights are no numbers: told at their load, by the real loader behind the real server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import pytest
from in_process import send

import tiny_embedders
import tiny_folder
from vllm_metal.config import Config
from vllm_metal.errors import NotAModel
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.run import running
from vllm_metal.settings import EngineConfig, ModelsConfig, ServerConfig

T = TypeVar("T")


def config_of(models_dir: Path, default: Path) -> Config:
    return Config(
        server=ServerConfig(port=0),
        engine=EngineConfig(device="cpu"),
        models=ModelsConfig(default=str(default), dir=str(models_dir)),
    )


def with_server(config: Config, talk: Callable[[str], T]) -> T:
    async def run() -> T:
        manager = ModelManager(config, persistent=True)
        async with running(config, manager) as [url, *_]:
            await manager.settled()
            return await asyncio.to_thread(talk, url)

    return asyncio.run(run())


def spoilt(folder: Path, name: str) -> Path:
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    weights[name] *= math.nan
    mx.save_safetensors(file, weights)
    return folder


def test_the_default_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    folder = spoilt(tiny_folder.save(tmp_path / "tiny"), name)

    def talk(url: str) -> None:
        ready = send(url, "GET", "/ready")
        assert (ready.status, ready.json["status"]) == (503, "failed")
        asked = send(url, "POST", "/v1/completions", {"prompt": "Hi"})
        assert asked.status == 503
        [told] = send(url, "GET", "/admin/status").json["models"]
        assert told["status"] == "failed"
        for message in (ready.json["detail"], asked.error["message"], told["detail"]):
            assert f"the weights of `{folder}` are damaged: `{name}`" in message
            assert "`metal pull`" in message
        assert send(url, "GET", "/health").status == 200

    with_server(config_of(tmp_path, folder), talk)
    assert "are damaged" in caplog.text


def test_others_are_served_beside_it(tmp_path: Path) -> None:
    whole = tiny_folder.save(tmp_path / "whole")
    spoilt(tiny_folder.save(tmp_path / "broken"), "model.embed_tokens.weight")
    encoder = spoilt(tiny_embedders.save_encoder(tmp_path / "encoder"), "encoder.layer.0.output.dense.weight")

    def talk(url: str) -> None:
        asked = send(url, "POST", "/v1/completions", {"model": "broken", "prompt": "Hi", "stream": True})
        assert asked.status == 503
        assert "`model.embed_tokens.weight` has what is not a number" in asked.error["message"]
        embedded = send(url, "POST", "/v1/embeddings", {"model": "encoder", "input": "a"})
        assert embedded.status == 503
        assert f"the weights of `{encoder}` are damaged" in embedded.error["message"]
        states = {each["id"]: each["state"] for each in send(url, "GET", "/v1/models").json["data"]}
        assert states == {"whole": "ok", "broken": "failed", "encoder": "failed"}
        assert send(url, "POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 1}).status == 200
        assert send(url, "GET", "/ready").status == 200

    with_server(config_of(tmp_path, whole), talk)


def test_a_server_that_is_started_for_it_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path, spoilt(tiny_folder.save(tmp_path / "tiny"), "model.embed_tokens.weight"))

    async def fate() -> Exception:
        manager = ModelManager(config)
        async with running(config, manager):
            return await manager.fatal

    assert isinstance(asyncio.run(fate()), NotAModel)
