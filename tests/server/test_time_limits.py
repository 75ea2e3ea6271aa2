"""A request's own time limit, while its model is still being loaded."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from in_process import Reply, send

import scripted_model
import tiny_folder
from vllm_metal.config import Config
from vllm_metal.engine.embedding_engine import EmbeddingEngine
from vllm_metal.errors import NotAModel
from vllm_metal.server.model_loader import ServingEngine
from vllm_metal.server.model_manager import ModelManager
from vllm_metal.server.run import running
from vllm_metal.settings import ModelsConfig, ServerConfig


@dataclass(frozen=True)
class EmbedderLoader(scripted_model.Loader):
    def engine_type(self, path: Path) -> type[ServingEngine]:
        return EmbeddingEngine


def ask_while_loading(
    folder: Path, loader_type: type[scripted_model.Loader], path: str, body: dict[str, Any]
) -> Reply:
    asked = threading.Event()

    def load() -> Any:
        asked.wait(60)
        raise NotAModel("it is none")

    async def main() -> Reply:
        server = ServerConfig(port=0, request_timeout=0.05)
        config = Config(server=server, models=ModelsConfig(default=str(folder)))
        manager = ModelManager(config, loader=loader_type(load), persistent=True)
        async with running(config, manager) as [url, *_]:
            try:
                return await asyncio.to_thread(send, url, "POST", path, body)
            finally:
                asked.set()

    return asyncio.run(main())


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "loader_type"),
    [
        ("/v1/chat/completions", {"messages": HI}, scripted_model.Loader),
        ("/v1/chat/completions", {"messages": HI, "stream": True}, scripted_model.Loader),
        ("/v1/completions", {"prompt": "Hi"}, scripted_model.Loader),
        ("/v1/responses", {"input": "Hi"}, scripted_model.Loader),
        ("/v1/responses", {"input": [*HI, *HI], "truncation": "auto"}, scripted_model.Loader),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}, scripted_model.Loader),
        ("/v1/embeddings", {"input": "Hi"}, EmbedderLoader),
        ("/v1/rerank", {"query": "Hi", "documents": ["Ho"]}, EmbedderLoader),
    ],
)
def test_it_is_answered_as_in_any_other_state(
    tmp_path: Path,
    path: str,
    body: dict[str, Any],
    loader_type: type[scripted_model.Loader],
) -> None:
    folder = tiny_folder.save(tmp_path / "tiny")
    reply = ask_while_loading(folder, loader_type, path, body)
    assert reply.status == 408
    assert reply.headers["x-should-retry"] == "false"
    assert "Retry-After" not in reply.headers
    error = reply.json["error"]
    assert error["type"] == "timeout_error"
    assert error["message"].startswith("the request did not end within its time limit: `tiny` is not ready: ")
    assert "`server.request_timeout`" in error["message"]
