"""Clients that embed and rerank, with all-MiniLM-L6-v2 beside a chat model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import openai
import pytest
from client_process import run
from openai.types import CreateEmbeddingResponse
from pydantic import TypeAdapter

import minilm
import tiny_embedders
import tiny_folder
from server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
TEXTS = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [0.6660, 0.1046, 0.1411]


@pytest.fixture(scope="module")
def embedding_server(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(minilm.fetch(cache_dir), folder / "minilm")
    tiny_embedders.save_encoder(folder / "reranker", compares=True)
    chat = tiny_folder.save(folder / "chat")
    with ServerProcess(str(chat), env={"METAL_MODELS_DIR": str(folder)}) as process:
        yield process.ready()


@pytest.mark.parametrize("encoding_format", ["base64", "float", None])
def test_openai(embedding_server, encoding_format):
    fields = {"encoding_format": encoding_format} if encoding_format else {}
    with openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.embeddings.create(model="minilm", input=TEXTS, **fields)
    if encoding_format != "base64":
        TypeAdapter(CreateEmbeddingResponse).validate_python(reply.to_dict(exclude_unset=True), strict=True)
        vectors = [each.embedding for each in reply.data]
        found = [sum(a * b for a, b in zip(*pair, strict=True)) for pair in combinations(vectors, 2)]
        assert found == pytest.approx(SIMILARITIES, abs=1e-3)


@pytest.mark.parametrize("client", ["langchain", "litellm"])
def test_libraries(python_of, embedding_server, tmp_path, client):
    script = SCRIPTS / f"{client}_embeddings.py"
    run([python_of(client), "-I", script, embedding_server.url], cwd=tmp_path)
